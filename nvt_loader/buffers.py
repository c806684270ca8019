"""Byte buffers that are used again.

Fresh memory costs as much as filling it: the kernel hands it out in pages of zeros.
"""

from __future__ import annotations

import collections
import weakref

import numpy as np


class Buffers:
    """Hands out byte buffers and takes each back when nothing refers to it any more."""

    def __init__(self) -> None:
        self._free: collections.deque[np.ndarray] = collections.deque()

    def take(self, size: int) -> np.ndarray:
        """Return ``size`` uninitialised bytes: uint8 [size].

        Slices of the array do not keep it alive: use it as a tensor's memory, or hold it.
        """
        buffer = None
        for _ in range(len(self._free)):
            try:
                found = self._free.popleft()
            except IndexError:  # another thread took it
                break
            if size <= len(found) <= 2 * size + 4096:
                buffer = found
                break
        if buffer is None:
            buffer = np.empty(size, np.uint8)
        view = buffer[:size]
        weakref.finalize(view, self._free.append, buffer).atexit = False
        return view
