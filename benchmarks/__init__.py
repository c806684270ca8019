"""Side-by-side measurements against what users would pick instead; see :mod:`benchmarks.harness`.

Each package here is a command, ``python -m benchmarks.NAME`` or ``make bench-NAME``.
"""
