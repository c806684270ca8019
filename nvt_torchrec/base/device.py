"""A GPU: arrays on it, kernels that work on them, and the comparison of their results with the CPU.

Code for a GPU takes a :class:`Device`, so that tests can pass one with NumPy arrays and Numba's
simulator instead (``tests/simulator/device.py``). Importing this module needs neither a GPU nor
CuPy nor numba.cuda.

Little of this code has run on GPUs yet (docs/gpu.md), so each run compares the first part of its
work with the CPU's. After a difference or an error, the run warns and continues with the code for
the CPU; or it ends with an error if the user asks for that.
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

#: An array on the GPU: CuPy's, or in tests NumPy's.
DeviceArray: TypeAlias = Any

#: The number of threads in a block; no kernel depends on it.
_BLOCK_THREADS = 256


class Device:
    """The first visible CUDA device: CuPy arrays in RMM's memory, and Numba kernels.

    All work runs on the current stream of the calling thread, in the order of the calls.

    Attributes:
        arrays: CuPy, or a module with the same functions.
        lanes: The number of threads of a kernel that share a column. 132 multiprocessors with 32
            warps each need 135,000 threads, so 16 columns fill an H200.
    """

    arrays: Any
    lanes = 1 << 13

    def __init__(self) -> None:
        import cupy
        from rmm.allocators.cupy import rmm_cupy_allocator

        use_pool()
        cupy.cuda.set_allocator(rmm_cupy_allocator)  # the same pool as libcudf's
        self.arrays = cupy

    def launch(self, kernel: Any, threads: int, *arguments: Any) -> None:
        """Run a kernel of :mod:`numba.cuda` in at least ``threads`` threads; none if 0."""
        if not threads:
            return
        from numba import cuda

        stream = cuda.external_stream(self.arrays.cuda.get_current_stream().ptr)
        converted = []
        for argument in arguments:
            if isinstance(argument, self.arrays.ndarray):
                # The kernel runs on CuPy's current stream, after the work that made the array.
                # Without sync=False, Numba would block until that work is done.
                argument = cuda.as_cuda_array(argument, sync=False)
            converted.append(argument)
        blocks = -(-threads // _BLOCK_THREADS)
        kernel[blocks, _BLOCK_THREADS, stream](*converted)

    def allocate_pinned(self, size: int) -> np.ndarray:
        """Allocate page-locked host memory, uint8 [size], for asynchronous copies to the GPU."""
        import cupyx

        return cupyx.empty_pinned(size, np.uint8)

    def upload(self, host: np.ndarray) -> DeviceArray:
        """Copy an array to the GPU; pinned memory must not change until :meth:`synchronize`."""
        array = self.arrays.empty(host.shape, host.dtype)
        array.set(host, stream=self.arrays.cuda.get_current_stream())
        return array

    def download(self, array: DeviceArray) -> np.ndarray:
        """Wait for an array, and copy it to pinned host memory from CuPy's pool."""
        import cupyx

        pinned = cupyx.empty_pinned(array.shape, array.dtype) if array.size else None
        return array.get(out=pinned)

    def download_all(self, arrays: Iterable[DeviceArray]) -> list[np.ndarray]:
        """Copy arrays as :meth:`download` does, and wait once for all. Not yet run on a GPU."""
        import cupyx

        copies = []
        for array in arrays:
            pinned = cupyx.empty_pinned(array.shape, array.dtype) if array.size else None
            copies.append(array.get(out=pinned, blocking=False))
        self.synchronize()
        return copies

    def stream(self) -> AbstractContextManager[Any]:
        """Make a new stream, which is the current one of the calling thread within the context."""
        return self.arrays.cuda.Stream(non_blocking=True)

    def synchronize(self) -> None:
        """Wait for the work on the current stream."""
        self.arrays.cuda.get_current_stream().synchronize()


def use_pool(**options: int) -> None:
    """Make RMM allocate from a CUDA memory pool, unless another memory resource was chosen.

    By default RMM asks the driver for each buffer, which waits until the GPU is idle. ``options``
    are passed to ``rmm.mr.CudaAsyncMemoryResource``.
    """
    import rmm

    if type(rmm.mr.get_current_device_resource()) is rmm.mr.CudaMemoryResource:
        rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource(**options))


def kernel(function: Callable) -> Any:
    """Return a function as a kernel of :mod:`numba.cuda`, which is compiled at its first launch."""
    from numba import cuda

    return cuda.jit(function)


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of the calling thread; do nothing for a CPU.

    Every new thread begins with the first GPU as its current device, also on ranks that use another
    one. When it leaves ``torch.cuda.stream(…)``, PyTorch returns to that GPU and creates a context
    on it, which takes about half a GB of its memory for each rank, and fails in the exclusive
    compute mode.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


class DeviceError(ClickLogError):
    """Code for a GPU that fails, or whose results differ from the CPU's."""


@contextlib.contextmanager
def device_errors(remedy: str) -> Iterator[None]:
    """Turn errors of CUDA, RMM and CuPy into errors with a remedy.

    The types of such errors depend on the library (RMM and CuPy raise MemoryError), and some become
    a plain ``Exception`` on their way from a worker, so they are recognized by their text.

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
    """Describe the first difference between arrays of a GPU and of the CPU; "" without one.

    Args:
        device: Computes the arrays on the GPU and copies them to the host. If it raises an error of
            any kind, the error is the difference.
        host: The same arrays as computed by the CPU, by name.
        tolerance: How much floats may differ, absolutely and relatively.
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
    """Warn that the code for the CPU takes over.

    Args:
        what: The work that failed on the GPU.
        why: The difference or error.
        instead: How the work is done from now on.
        strict: Whether to raise an error instead.

    Raises:
        DeviceError: ``strict`` is set.
    """
    if strict:
        raise DeviceError(
            f"{what} differs from the CPU's: {why}",
            "report this; without --strict_gpu the CPU takes over",
        )
    log.warning("%s differs from the CPU's: %s\n  -> %s; please report this", what, why, instead)
