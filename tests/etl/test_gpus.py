"""How GPUs are found and shared out, with stand-ins for CUDA's driver and for dask-cuda."""

from __future__ import annotations

import enum
import sys
import types
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl import engine_choice
from nvt_torchrec.etl.engine_choice import choose_engine
from nvt_torchrec.etl.engines import cluster, device
from nvt_torchrec.etl.settings import EtlSettings
from tests.logs import CRITEO

CARD = 141 << 30


class CUresult(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


def driver(memory: int) -> types.SimpleNamespace:
    """``cuda.bindings.driver`` of a machine with one device of ``memory`` bytes, or none."""
    done = CUresult.CUDA_SUCCESS

    def begin(flags: int) -> tuple[CUresult]:
        return (done if memory else CUresult.CUDA_ERROR_NO_DEVICE,)

    begin.__name__ = "cuInit"
    return types.SimpleNamespace(
        CUresult=CUresult,
        cuInit=begin,
        cuDeviceGet=lambda ordinal: (done, f"device {ordinal}"),
        cuDeviceTotalMem=lambda device: (done, {"device 0": memory}[device]),
    )


class Cuda(types.ModuleType):
    """``dask_cuda``, which notes how a cluster is started and starts one without GPUs.

    Args:
        dedicated: Whether the GPUs have memory of their own.
    """

    def __init__(self, *, dedicated: bool = True) -> None:
        super().__init__("dask_cuda")
        self.asked: dict[str, object] = {}
        self.utils = types.ModuleType("dask_cuda.utils")
        self.utils.has_device_memory_resource = lambda: dedicated

    def LocalCUDACluster(  # noqa: N802
        self, rmm_pool_size: int, device_memory_limit: int, pre_import: str, **options: object
    ) -> LocalCluster:
        self.asked.update(pool=rmm_pool_size, limit=device_memory_limit, pre_import=pre_import)
        return LocalCluster(**options, processes=False)


def count_threads(client: Client) -> list[int]:
    return [*client.nthreads().values()]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Make it one with so many GPUs that CUDA shows, of so many bytes, if these are visible."""

    def make(shown: int, memory: int = CARD, visible: str | None = None) -> None:
        monkeypatch.setattr(device, "find_spec", lambda name: name)
        monkeypatch.setattr("numba.cuda.is_available", lambda: shown > 0)
        monkeypatch.setattr("numba.cuda.gpus", range(shown))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        bindings = types.ModuleType("cuda.bindings")
        bindings.driver = driver(memory)
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)

    return make


@pytest.mark.parametrize(
    ("shown", "visible", "count"),
    [
        (8, None, 8),
        (2, "0,1", 2),
        (1, "GPU-1d2f", 1),
        (0, "", 0),
        (1, "MIG-41b3359c", 1),
        (1, "MIG-41b3359c,MIG-65b79fff,MIG-c6e2bae8", 3),
    ],
)
def test_instances_of_a_card_are_gpus(machine, shown: int, visible: str | None, count: int) -> None:
    """CUDA shows a process the first of those that are listed."""
    machine(shown, visible=visible)
    assert device.gpu_count() == count


def test_a_driver_that_refuses(machine) -> None:
    machine(0, memory=0)
    with pytest.raises(OSError, match="cuInit: CUDA_ERROR_NO_DEVICE"):
        device.gpu_memory()


def test_pools_are_shares_of_an_instance(
    machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """dask-cuda would take shares of the whole card for each of its instances."""
    module = Cuda()
    monkeypatch.setitem(sys.modules, "dask_cuda", module)
    monkeypatch.setitem(sys.modules, "dask_cuda.utils", module.utils)
    memory = 16 << 30
    machine(1, memory, "MIG-41b3359c,MIG-65b79fff")
    with cluster.local_cluster(None, tmp_path) as client:
        # each does two tasks at once
        assert count_threads(client) == [2, 2]
    assert module.asked == {
        "pool": int(0.7 * memory),
        "limit": int(0.8 * memory),
        "pre_import": "nvt_torchrec.nvt_compat",
    }
    with (
        pytest.raises(SettingsError, match="3 workers for 2 GPUs"),
        cluster.local_cluster(3, tmp_path),
    ):
        pass


def test_operators_and_cores_have_a_thread_each(
    machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = Cuda()
    monkeypatch.setitem(sys.modules, "dask_cuda", module)
    monkeypatch.setitem(sys.modules, "dask_cuda.utils", module.utils)
    machine(1)
    with cluster.local_cluster(1, tmp_path, frames=True) as client:
        assert count_threads(client) == [1]
    machine(0)
    with cluster.local_cluster(1, tmp_path) as client:
        assert count_threads(client) == [1]


def test_an_integrated_gpu_has_no_memory_to_spill_from(
    machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """dask-cuda refuses a limit of it."""
    module = Cuda(dedicated=False)
    monkeypatch.setitem(sys.modules, "dask_cuda", module)
    monkeypatch.setitem(sys.modules, "dask_cuda.utils", module.utils)
    machine(1)
    with cluster.local_cluster(None, tmp_path):
        assert module.asked["limit"] is None


@pytest.mark.parametrize(
    ("gpus", "gigabytes", "options", "engine"),
    [
        (0, 1000, {}, "cpu"),
        (1, 100, {}, "dask"),
        (1, 30, {}, "cpu"),  # the CPU is done when the GPU's worker has started
        (2, 30, {}, "dask"),
        (0, 1, {"scheduler": "tcp://host:8786"}, "dask"),
        (2, 1000, {"engine": "cpu"}, "cpu"),
    ],
)
def test_auto_is_what_takes_less_time(
    machine,
    tmp_path: Path,
    monkeypatch,
    gpus: int,
    gigabytes: int,
    options: dict,
    engine: str,
) -> None:
    machine(gpus)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engine_choice, "count_cores", lambda: 16)
    days = [DayFile(day, "", gigabytes * 10**9 // 4, "") for day in range(4)]
    asked = EtlSettings(str(tmp_path), tmp_path / "out", CRITEO, **options)
    chosen = choose_engine(asked, days)
    assert chosen.engine == engine
    assert choose_engine(chosen, days) == chosen
