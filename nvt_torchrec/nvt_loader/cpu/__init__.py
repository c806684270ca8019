"""Build blocks of batches in CPU memory. This package imports only :mod:`nvt_loader.parquet`."""
