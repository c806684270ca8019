"""Build blocks of batches on a GPU. This package imports :mod:`nvt_loader.parquet` and ``cpu``."""
