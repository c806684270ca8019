"""Side-by-side measurements against what users would pick instead; see :mod:`benchmarks.harness`.

Commands, ``python -m benchmarks.NAME`` or ``make bench-NAME``: ``etl``, ``loader``, ``train`` (and
``train quality``), ``inference``, ``gpu`` and ``daily``.
"""
