"""The engines that count and encode: our kernels in threads or on Dask, or NVTabular over Dask."""
