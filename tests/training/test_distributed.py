"""How ranks find each other when a job starts, or starts again."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.training.launch.distributed import (
    choose_gpu,
    open_attempt_store,
    process_group,
)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def _start(store: dist.Store, world_size: int = 3) -> list[dist.Store]:
    with ThreadPoolExecutor(world_size) as threads:
        return list(
            threads.map(lambda rank: open_attempt_store(store, rank, world_size), range(world_size))
        )


@pytest.mark.parametrize(
    ("visible", "local", "chosen"),
    [
        ("ab", ["0", "1"], [0, 1]),
        ("ab", [None, None], [0, 1]),
        (["a", "b"], ["0", "0"], [0, 0]),  # torchrun --virtual-local-rank
        (["a", "b"], ["0", "1"], [0, 0]),  # a GPU a task, under Slurm
        (["a", "b"], [None, None], [0, 0]),
    ],
)
def test_each_rank_has_a_gpu(store, monkeypatch, visible, local, chosen):
    """``visible`` are the GPUs that all ranks see, or those of each one."""
    found = [
        _choose(store, monkeypatch, rank, visible if visible == "ab" else visible[rank], own)
        for rank, own in enumerate(local)
    ]
    assert found == [torch.device("cuda", index) for index in chosen]


@pytest.mark.parametrize("local", [["0", "0"], ["0", "1"], [None, None]])
def test_two_ranks_on_a_gpu(store, monkeypatch, local):
    _choose(store, monkeypatch, 0, "a", local[0])
    with pytest.raises(SettingsError, match=r"rank 1: another process uses its GPU"):
        _choose(store, monkeypatch, 1, "a", local[1])


def _choose(store, monkeypatch, rank: int, visible: str, local: str | None) -> torch.device:
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(visible))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda device: SimpleNamespace(uuid=visible[device.index]),
    )
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    return choose_gpu(store, rank)


def test_every_start_has_keys_of_its_own(store):
    """Though the shared store still holds those of the starts before."""
    first, second = _start(store), _start(store)
    first[0].set("address", "gone")
    assert not any(one.check(["address"]) for one in second)
    second[0].set("address", "here")
    assert {one.get("address") for one in second} == {b"here"}
    assert {one.get("address") for one in first} == {b"gone"}


@pytest.mark.parametrize(("rank", "absent"), [(0, "1, 2"), (2, "0")])
def test_a_rank_that_does_not_start_is_named(store, rank, absent):
    store.set_timeout(datetime.timedelta(seconds=0.2))
    with pytest.raises(SettingsError, match=rf"rank {absent} of 3 did not start within 0\.2 s"):
        open_attempt_store(store, rank, 3)


@pytest.mark.parametrize(
    ("given", "by_torchrun", "threads"),
    [("1", True, [1]), ("1", False, []), ("3", True, []), (None, False, [1])],
)
def test_threads_that_a_user_gives_are_kept(monkeypatch, given, by_torchrun, threads):
    """PyTorch takes them by itself; 1 is what torchrun gives."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    found = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    with process_group():
        assert found == threads
