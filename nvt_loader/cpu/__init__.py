"""Blocks in CPU memory. Imports :mod:`nvt_loader.parquet`, and is imported by
:mod:`nvt_loader.cuda`."""
