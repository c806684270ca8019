"""What runs on a GPU only. ``make test-gpu`` runs it; without a GPU every test says why it cannot.

``GPU_TESTS_ON=cpu`` rehearses them on a CPU: the same code, compared with itself. That shows that
the tests work, and nothing about GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

REHEARSAL = os.environ.get("GPU_TESTS_ON") == "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU that is tested."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if REHEARSAL:
        return torch.device("cpu")
    pytest.skip("needs a GPU (GPU_TESTS_ON=cpu rehearses it without)")


@pytest.fixture(scope="session")
def rapids(device: torch.device) -> bool:
    """Whether frames are cuDF's: not in a rehearsal."""
    if device.type == "cpu":
        return False
    if find_spec("cudf") is None or find_spec("dask_cuda") is None:
        pytest.skip("needs RAPIDS: requirements/gpu.txt")
    return True


@pytest.fixture(scope="session")
def client(rapids: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A client of a LocalCUDACluster of one worker with a small pool; torch needs memory, too.

    It has one thread, because NVTabular's operators run there, too.
    """
    from nvt_torchrec.etl.engines import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "POOL_SHARE", 0.1)
        with cluster.local_cluster(1, tmp_path_factory.mktemp("dask"), frames=True) as started:
            yield started


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training without --log_path writes to the directory that it is started in."""
    monkeypatch.chdir(tmp_path)
