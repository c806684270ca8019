"""Read rows from parquet files and other sources into CPU memory.

This package imports no other part of :mod:`nvt_loader`. Its modules depend on each other as
follows (``a ← b``: b imports a): sources ← dataset, row_chunks ← checks ← page_reader ← decoder;
pages ← page_values ← page_reader. All of them use the compiled loops of parquet_kernels.
"""
