"""Lists of a few rows are summed by a loop of our own: the same numbers as PyTorch's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

from nvt_torchrec.formats.ids import Ids, find_offsets
from nvt_torchrec.inference.model.scoring import JoinedTable, ServingModel, sum_embeddings
from nvt_torchrec.inference.model.torch_threads import ONE_THREAD_ROWS

ROWS = 500


@pytest.mark.parametrize("dim", [1, 3, 8, 33, 128])
def test_sums_equal_those_of_pytorch(dim: int) -> None:
    generator = np.random.default_rng(dim)
    sizes = 10.0 ** generator.integers(-3, 4, (ROWS, 1))  # so that the order of a sum matters
    table = (generator.normal(size=(ROWS, dim)) * sizes).astype(np.float32)
    lengths = generator.integers(0, 120, (3, 7))
    offsets, first = find_offsets(lengths), np.array([0, 100, 300])
    ids = generator.integers(0, 100, lengths.sum())
    sums = np.zeros((7, 3, dim), np.float32)
    assert sum_embeddings(table, first, 2, ids, offsets, sums)
    index = torch.from_numpy(ids + first.repeat(lengths.sum(1)))
    begins = torch.from_numpy(offsets[:, :-1].flatten())
    wanted = functional.embedding_bag(index, torch.from_numpy(table), begins, mode="sum")
    wanted = wanted.view(3, 7, dim).transpose(0, 1)
    wanted[:, 2] /= torch.from_numpy(lengths[2].clip(1)).unsqueeze(1)  # a history: the mean
    assert torch.equal(torch.from_numpy(sums), wanted)
    for outside in (-1, ROWS):
        ids[0] = outside
        assert not sum_embeddings(table, first, 2, ids, offsets, sums)


@dataclasses.dataclass
class _Config:
    """What a lookup asks of a configuration: two columns, one of lists, and a history."""

    categorical: tuple[str, ...] = ("user", "tags")
    max_events: int = 3


@pytest.mark.parametrize("features", [2, 3])
def test_a_row_is_looked_up_as_in_a_batch(features: int) -> None:
    """With the history, of which the newest events count, and without it."""
    generator = np.random.default_rng(features)
    table = JoinedTable(torch.from_numpy(generator.normal(size=(ROWS, 5)).astype(np.float32)))
    head = torch.nn.Identity()
    model = ServingModel(table, torch.tensor([0, 100, 200]), head, _Config())  # type: ignore[arg-type]
    rows = ONE_THREAD_ROWS + 1
    lengths = generator.integers(0, 9, (features, rows))
    lengths[0] = 1
    ids = Ids(generator.integers(0, 100, lengths.sum(), np.int32), find_offsets(lengths))
    found = model.lookup(ids)
    assert found.shape == (rows, 3, 5)
    for begin in (0, 1):
        few = model.lookup(ids.slice(begin, begin + ONE_THREAD_ROWS))
        assert torch.equal(few, found[begin : begin + ONE_THREAD_ROWS])
    assert torch.equal(model.lookup(ids.slice(5, 6)), found[5:6])
