"""Blocks of batches, and their making in CPU memory. Imports :mod:`nvt_loader.parquet` only."""
