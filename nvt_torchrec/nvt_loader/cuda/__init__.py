"""Blocks on a GPU, which have never run on one. Imports :mod:`nvt_loader.parquet` and ``cpu``."""
