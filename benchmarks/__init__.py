"""Side-by-side measurements against the programs that users would choose instead of this one.

Each benchmark is a command, ``python -m benchmarks.NAME``, built with :mod:`benchmarks.harness`.
"""
