"""A card: arrays on it, kernels that work on them, and the comparison of both with the host.

Code for a card takes a :class:`Device`, so that tests can give it one of NumPy's arrays and numba's
simulator instead (``tests/simulator/device.py``). Importing this module needs no card, and
neither CuPy nor numba.cuda.

Little of it has run on cards yet (docs/gpu.md), so each run compares the first part of its work
with the host's: a difference or an error is a warning, after which the run goes on with the host's
code, or, where the user asks for that, an error.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nvt_torchrec.base.errors import ClickLogError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: An array on the card: CuPy's, or in tests NumPy's.
DeviceArray: TypeAlias = Any

#: Threads of a block of a kernel; no kernel depends on it.
_BLOCK_THREADS = 256


class Device:
    """The first visible CUDA device: CuPy's arrays, in RMM's memory, and numba's kernels.

    All work is done in the order of the calls on the current stream of the calling thread.

    Attributes:
        arrays: CuPy, or a module with the same functions on the same arrays.
        lanes: How many threads of a kernel share a column. 32 warps on each of 132 multiprocessors
            want 135,000 threads: 16 columns fill an H200.
    """

    arrays: Any
    lanes = 1 << 13

    def __init__(self) -> None:
        import cupy
        from rmm.allocators.cupy import rmm_cupy_allocator

        use_pool()
        cupy.cuda.set_allocator(rmm_cupy_allocator)  # the pool that libcudf uses, too
        self.arrays = cupy

    def launch(self, kernel: Any, threads: int, *arguments: Any) -> None:
        """Run a kernel of :mod:`numba.cuda` in at least so many threads."""
        if not threads:
            return
        from numba import cuda

        stream = cuda.external_stream(self.arrays.cuda.get_current_stream().ptr)
        converted = []
        for argument in arguments:
            if isinstance(argument, self.arrays.ndarray):
                # The kernel runs on CuPy's current stream, behind all that made the array. Without
                # sync=False, numba would wait for that stream.
                argument = cuda.as_cuda_array(argument, sync=False)
            converted.append(argument)
        blocks = -(-threads // _BLOCK_THREADS)
        kernel[blocks, _BLOCK_THREADS, stream](*converted)

    def allocate_pinned(self, size: int) -> np.ndarray:
        """Return memory of the host from which copies to the card run by themselves: uint8."""
        import cupyx

        return cupyx.empty_pinned(size, np.uint8)

    def upload(self, host: np.ndarray) -> DeviceArray:
        """Copy an array to the card; pinned memory must not change until :meth:`synchronize`."""
        array = self.arrays.empty(host.shape, host.dtype)
        array.set(host, stream=self.arrays.cuda.get_current_stream())
        return array

    def download(self, array: DeviceArray) -> np.ndarray:
        """Wait for an array and copy it to pinned memory of the host, which CuPy's pool keeps."""
        import cupyx

        pinned = cupyx.empty_pinned(array.shape, array.dtype) if array.size else None
        return array.get(out=pinned)

    def download_all(self, arrays: Iterable[DeviceArray]) -> list[np.ndarray]:
        """Copy arrays as :meth:`download` does, and wait once for all. It has not run on a card."""
        import cupyx

        copies = []
        for array in arrays:
            pinned = cupyx.empty_pinned(array.shape, array.dtype) if array.size else None
            copies.append(array.get(out=pinned, blocking=False))
        self.synchronize()
        return copies

    def stream(self) -> AbstractContextManager[Any]:
        """Make a new stream; it is the calling thread's current one within the context."""
        return self.arrays.cuda.Stream(non_blocking=True)

    def synchronize(self) -> None:
        """Wait for the work of the current stream."""
        self.arrays.cuda.get_current_stream().synchronize()


def use_pool(**options: int) -> None:
    """Let RMM take the current GPU's memory from a CUDA pool, unless somebody chose a resource.

    By default RMM asks the driver for each buffer, which waits until the GPU is idle. ``options``
    are those of ``rmm.mr.CudaAsyncMemoryResource``.
    """
    import rmm

    if type(rmm.mr.get_current_device_resource()) is rmm.mr.CudaMemoryResource:
        rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource(**options))


def kernel(function: Callable) -> Any:
    """Return a function as a kernel of :mod:`numba.cuda`, compiled at its first launch."""
    from numba import cuda

    return cuda.jit(function)


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of the calling thread; on a CPU, do nothing.

    A thread begins with the first GPU as its current one, also on ranks that use another.
    Leaving ``torch.cuda.stream(…)`` there returns to that GPU, and would create a context on it:
    about half a GB of its memory for each rank, and an error in the exclusive compute mode.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


class DeviceError(ClickLogError):
    """Code for a card fails, or computes something else than the host's."""


@contextlib.contextmanager
def device_errors(remedy: str) -> Iterator[None]:
    """Explain errors of CUDA, and of RMM and CuPy, which report a lack of memory by MemoryError.

    Their types depend on the library, and some become an ``Exception`` on their way from a worker.

    Raises:
        DeviceError: Instead of such an error, with ``remedy``.
    """
    try:
        yield
    except (ClickLogError, OSError):
        raise
    except Exception as error:
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        if not isinstance(error, MemoryError) and "cuda" not in f"{name} {error}".lower():
            raise
        raise DeviceError(f"the GPU failed: {type(error).__name__}: {error}", remedy) from error


def find_difference(
    device: Callable[[], Mapping[str, np.ndarray]],
    host: Mapping[str, np.ndarray],
    tolerance: float = 0.0,
) -> str:
    """Return how the arrays of a card differ from the host's; "" if they do not.

    Args:
        device: Computes the arrays on the card and copies them to the host. If it raises an error
            of any kind, that is the difference.
        host: The same arrays, by name.
        tolerance: By how much floats may differ, as a share of their magnitude or of 1.
    """
    try:
        computed = device()
        for name, expected in host.items():
            array = computed[name]
            if (array.dtype, array.shape) != (expected.dtype, expected.shape):
                shapes = [f"{a.dtype} {list(a.shape)}" for a in (array, expected)]
                return f"{name} is {' instead of '.join(shapes)}"
            same = array == expected
            if tolerance and expected.dtype.kind == "f":
                same |= np.isclose(array, expected, tolerance, tolerance, equal_nan=True)
            if not same.all():
                index = np.unravel_index(np.argmin(same), same.shape)
                listed = ", ".join(map(str, index))
                return (
                    f"{name}[{listed}] is {array[index]} instead of {expected[index]} "
                    f"({np.count_nonzero(~same)} of {same.size} values differ)"
                )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fall_back(what: str, why: str, instead: str, *, strict: bool) -> None:
    """Warn that the host's code takes over.

    Args:
        what: What failed on the card.
        why: The difference or error.
        instead: What is done from now on.
        strict: Raise an error instead.

    Raises:
        DeviceError: ``strict`` is set.
    """
    if strict:
        raise DeviceError(
            f"{what} differs from the CPU's: {why}",
            "report this; without --strict_gpu the CPU takes over",
        )
    log.warning("%s differs from the CPU's: %s\n  -> %s; please report this", what, why, instead)
