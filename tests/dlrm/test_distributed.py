"""How ranks find each other when a job starts, or starts again."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.dlrm.launch.distributed import store_of_this_attempt


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def _start(store: dist.Store, world_size: int = 3) -> list[dist.Store]:
    with ThreadPoolExecutor(world_size) as threads:
        return list(
            threads.map(
                lambda rank: store_of_this_attempt(store, rank, world_size), range(world_size)
            )
        )


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
        store_of_this_attempt(store, rank, 3)
