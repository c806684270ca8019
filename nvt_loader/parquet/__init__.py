"""Parquet files → rows in CPU memory. Imports neither :mod:`nvt_loader.cpu` nor
:mod:`nvt_loader.cuda`; ``plan``, ``buffers``, ``kernels`` and ``native`` above are shared by all.

Inside: columns ← dataset, row_chunks ← checks ← arrow_reader, page_reader ← decoder; row_chunks ←
shard_reader; pages ← dictionary_indices ← page_values ← page_reader.
"""
