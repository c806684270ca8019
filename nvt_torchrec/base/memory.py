"""What a process holds of memory that it has freed."""

from __future__ import annotations

import ctypes


def release_memory() -> None:
    """Give memory that was freed back to the system: glibc keeps some of it for the process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack it
    if trim:
        trim(0)
