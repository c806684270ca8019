"""Saved workflow + checkpoint → click probabilities.

Nothing here imports NVTabular, Dask or TorchRec.
"""

from nvt_torchrec.base.links import follow_link

follow_link(__name__)
