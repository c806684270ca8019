"""What a process holds of memory that it has freed."""

from __future__ import annotations

import ctypes

import pyarrow as pa


def release_memory() -> None:
    """Give memory that was freed back to the system: glibc and Arrow keep some for the process."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack it
    if trim:
        trim(0)
