"""From a feature spec to an NVTabular Workflow, and to disk and back.

:mod:`workflows.store` builds, saves and loads genuine ``nvtabular.Workflow`` objects; no other
module here imports NVTabular, Dask or pandas.
"""

from nvt_torchrec.base.links import follow_link

follow_link(__name__)
