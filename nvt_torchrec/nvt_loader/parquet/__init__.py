"""Parquet files and other sources → rows in CPU memory. Imports no other part of :mod:`nvt_loader`.

Inside: sources ← dataset, row_chunks ← checks ← page_reader ← decoder; pages ←
page_values ← page_reader; kernels for all of them.
"""
