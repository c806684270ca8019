"""Saved workflow + checkpoint → click probabilities.

Nothing here imports NVTabular, Dask or pandas, except the benchmark.
"""
