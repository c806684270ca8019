"""Side-by-side measurements against what users would pick instead; see :mod:`benchmarks.harness`.

Commands, ``python -m benchmarks.NAME``: ``etl``, ``loader``, ``train``, ``regression``, and, on a
GPU, ``stages``.
"""
