"""A card that is none: NumPy's arrays, and kernels in numba's simulator."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any

import numpy as np

#: The simulator runs one kernel at a time.
_RUNNING = threading.Lock()
_BLOCK_THREADS = 4


class SimulatedDevice:
    """A :class:`clicklog.device.Device`, strict about the threads that use it.

    Attributes:
        streams: How many streams were made.
    """

    arrays = np
    lanes = 2

    def __init__(self) -> None:
        self.streams = 0

    def launch(self, kernel: Any, threads: int, *arguments: Any) -> None:
        for argument in arguments:
            assert not isinstance(argument, np.ndarray) or argument.flags.c_contiguous
        if not threads:
            return
        with _RUNNING, warnings.catch_warnings():
            # products of 64 bits wrap around on a card; NumPy's scalars warn about it
            warnings.simplefilter("ignore", RuntimeWarning)
            kernel[-(-threads // _BLOCK_THREADS), _BLOCK_THREADS](*arguments)

    def pinned(self, size: int) -> np.ndarray:
        return np.full(size, 0xFF, np.uint8)

    def upload(self, host: np.ndarray) -> np.ndarray:
        return np.array(host)

    def download(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def stream(self) -> Any:
        self.streams += 1
        return contextlib.nullcontext()

    def libcudf_stream(self) -> str:
        return "stream"

    def synchronize(self) -> None:
        pass
