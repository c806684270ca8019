"""Raw click logs: files of any format and rows in memory as typed rows, and synthetic logs.

This package imports neither NVTabular nor Dask nor PyTorch.
"""
