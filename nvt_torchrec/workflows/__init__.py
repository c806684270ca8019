"""Workflows: built from a feature spec, fitted, saved, loaded, inspected and extended.

:mod:`workflows.store` builds, saves and loads genuine ``nvtabular.Workflow`` objects; no other
module here imports NVTabular, Dask or pandas.
"""

from nvt_torchrec.base.links import follow_link

follow_link(__name__)
