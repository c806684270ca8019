"""Raw click logs: files of any format to rows, rows in memory, and the synthetic log.

Knows no NVTabular, Dask or torch.
"""
