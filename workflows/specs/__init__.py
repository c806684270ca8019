"""Feature specs that come with this project (data only); see :func:`clicklog.spec.load_spec`."""
