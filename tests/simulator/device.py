"""A card that is none: NumPy's arrays, and kernels in numba's simulator."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from nvt_torchrec.base.device import Device
from tests.kernel_arguments import ARGUMENTS, described

#: The simulator runs one kernel at a time.
_RUNNING = threading.Lock()
_BLOCK_THREADS = 4


class _Arrays:
    """NumPy's functions; new arrays hold anything, as a card's memory does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(shape: Any, dtype: Any) -> np.ndarray:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xA5
        return array


class SimulatedDevice(Device):
    """A device that is strict about the threads that use it.

    Attributes:
        streams: How many streams were made.
    """

    arrays = _Arrays()
    lanes = 2

    def __init__(self) -> None:
        self.streams = 0

    def launch(self, kernel: Any, threads: int, *arguments: Any) -> None:
        for argument in arguments:
            assert not isinstance(argument, np.ndarray) or argument.flags.c_contiguous
        assert " ".join(map(described, arguments)) == ARGUMENTS[kernel.fn.__name__]
        if not threads:
            return
        with _RUNNING, warnings.catch_warnings():
            # products of 64 bits wrap around on a card; NumPy's scalars warn about it
            warnings.simplefilter("ignore", RuntimeWarning)
            kernel[-(-threads // _BLOCK_THREADS), _BLOCK_THREADS](*arguments)

    def allocate_pinned(self, size: int) -> np.ndarray:
        return np.full(size, 0xFF, np.uint8)

    def upload(self, host: np.ndarray) -> np.ndarray:
        return np.array(host)

    def download(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def download_all(self, arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
        return [np.array(array) for array in arrays]

    def stream(self) -> Any:
        self.streams += 1
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass
