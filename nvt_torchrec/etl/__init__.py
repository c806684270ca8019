"""Raw click log → fitted, saved NVTabular Workflow + parquet. Does not import torch."""

from nvt_torchrec.base.links import follow_link

follow_link(__name__)
