"""What is asked of CuPy, RMM and numba.cuda, by stand-ins that are strict about it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from numba import cuda

from nvt_torchrec.base.device import Device


class Array(np.ndarray):
    """CuPy's array: ``set`` takes one of the same kind and a stream, ``get`` pinned memory."""

    def set(self, host: np.ndarray, stream: object) -> None:
        assert (host.shape, host.dtype) == (self.shape, self.dtype)
        assert stream is streams[-1]
        self[...] = host

    def get(self, out: np.ndarray) -> np.ndarray:
        assert any(out is memory for memory in pinned)
        out[...] = self
        return out


class Stream:
    def __init__(self, *, non_blocking: bool = False) -> None:
        assert non_blocking or not streams  # CUDA's default stream would wait for a blocking one
        self.ptr = id(self)
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1

    def __enter__(self) -> None:
        streams.append(self)

    def __exit__(self, *_: object) -> None:
        assert streams.pop() is self


class Kernel:
    """Notes how it is launched."""

    def __getitem__(self, configuration: tuple) -> Kernel:
        self.configuration = configuration
        return self

    def __call__(self, *arguments: object) -> None:
        self.arguments = arguments


class CudaMemoryResource:
    """RMM's default: each buffer is asked of the driver."""


class CudaAsyncMemoryResource:
    """A pool of the driver's."""


class PoolMemoryResource:
    """What dask-cuda makes for a worker."""


streams: list[Stream] = []
resources: list[object] = []
pinned: list[np.ndarray] = []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    streams[:] = []
    streams.append(Stream())
    allocators: list[object] = []
    cupy = ModuleType("cupy")
    cupy.ndarray = Array
    cupy.empty = lambda shape, dtype: np.empty(shape, dtype).view(Array)
    cupy.cuda = SimpleNamespace(
        Stream=Stream, get_current_stream=lambda: streams[-1], set_allocator=allocators.append
    )
    cupyx = ModuleType("cupyx")

    def empty_pinned(shape: int | tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        pinned.append(np.empty(shape, dtype))
        return pinned[-1]

    cupyx.empty_pinned = empty_pinned
    modules = {"cupy": cupy, "cupyx": cupyx}
    for name in ("rmm", "rmm.allocators", "rmm.allocators.cupy", "rmm.pylibrmm"):
        modules[name] = ModuleType(name)
    resources[:] = [CudaMemoryResource()]
    modules["rmm"].mr = SimpleNamespace(
        CudaMemoryResource=CudaMemoryResource,
        CudaAsyncMemoryResource=CudaAsyncMemoryResource,
        get_current_device_resource=lambda: resources[-1],
        set_current_device_resource=resources.append,
    )
    modules["rmm.allocators.cupy"].rmm_cupy_allocator = "rmm's"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cuda, "external_stream", lambda ptr: ("stream", ptr), raising=False)

    def as_cuda_array(array: Array, sync: bool = True) -> tuple:
        assert isinstance(array, Array)
        assert not sync  # it would wait for the stream at every launch
        return ("there", array.shape)

    monkeypatch.setattr(cuda, "as_cuda_array", as_cuda_array, raising=False)
    made = Device()
    assert allocators == ["rmm's"]
    return made


def test_a_kernel_is_launched_on_the_current_stream(device: Device) -> None:
    kernel = Kernel()
    with device.stream():
        array = device.upload(np.arange(6).reshape(2, 3))
        device.launch(kernel, 1000, 5, array)
        blocks, threads, stream = kernel.configuration
        assert stream == ("stream", streams[-1].ptr)
        device.synchronize()
        assert streams[-1].waited == 1
    assert blocks * threads >= 1000
    assert (blocks - 1) * threads < 1000
    assert kernel.arguments == (5, ("there", (2, 3)))
    assert streams[0].waited == 0


def test_copies(device: Device) -> None:
    host = device.allocate_pinned(4)
    host[:] = [1, 2, 3, 4]
    array = device.upload(host)
    host[:] = 0
    assert device.download(array).tolist() == [1, 2, 3, 4]
    assert type(device.download(array)) is np.ndarray


def test_a_pool_is_made_where_nobody_chose_one(device: Device) -> None:
    """As in a worker that was started by hand, or in the benchmark of the stages."""
    assert type(resources[-1]) is CudaAsyncMemoryResource
    resources.append(chosen := PoolMemoryResource())
    Device()
    assert resources[-1] is chosen
