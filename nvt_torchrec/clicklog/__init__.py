"""The ground floor: feature spec, raw click logs, files on disk.

Knows no NVTabular, Dask or torch.
"""
