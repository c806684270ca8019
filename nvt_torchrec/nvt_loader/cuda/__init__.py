"""Blocks on a GPU. Imports :mod:`nvt_loader.parquet` and ``cpu``."""
