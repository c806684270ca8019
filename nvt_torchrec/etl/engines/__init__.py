"""The engines that fit and transform: compiled on the CPU, or NVTabular over Dask."""
