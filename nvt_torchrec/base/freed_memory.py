"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes

import pyarrow as pa


def release_memory() -> None:
    """Return freed memory to the system; glibc and Arrow would keep some of it for the process."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack it
    if trim:
        trim(0)
