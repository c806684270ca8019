"""Which row of a checkpoint's table a row of a larger table starts as."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.base.hashing import murmur3_int
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.vocabularies import Generation
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.training.checkpoint.restoring import GrownTable, grow_tables
from tests.training.shapes import dlrm


class KnownWorkflow(WorkflowDescription):
    """A workflow without files: value i of a vocabulary is 10 i."""

    def oov_ids(self, column, ids):
        values = 10 * (np.asarray(ids, np.int64) - column.reserved_ids)
        if not len(ids):
            return np.empty(0, np.int64)
        return 2 + (murmur3_int(values) % np.uint32(column.oov_ids)).astype(np.int64)


def config(sizes) -> ModelConfig:
    names = tuple(f"cat_{i}" for i in range(len(sizes)))
    return dlrm(("int_0",), names, tuple(sizes), 4, (4,), (4, 1), 0.0)


def lineage(values: list[int], column: CategoricalColumn) -> KnownWorkflow:
    spec = FeatureSpec("label", (), (column,))
    generations = tuple(
        Generation(number, f"{number:064x}", (number,), {"cat_0": count})
        for number, count in enumerate(values)
    )
    return KnownWorkflow(None, spec, {}, {}, {}, generations[-1].digest, {}, generations)


@st.composite
def histories(draw):
    """A column, and the number of its values by generation."""
    buckets = draw(st.sampled_from([0, 0, 3]))
    column = CategoricalColumn(
        "cat_0", raw="int", max_table_size=10_000 if buckets else 0, num_buckets=buckets
    )
    added = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    return column, np.cumsum(added).tolist()


@given(histories(), st.data())
def test_rows_follow_their_values(history, data):
    """Against a walk through the generations, value by value."""
    column, values = history
    workflow = lineage(values, column)
    since = data.draw(st.integers(0, len(values) - 1))
    then, now = (column.reserved_ids + values[number] for number in (since, -1))
    spare = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 5))  # rows given by hand
    sizes = then + spare[0], max(now + spare[1], now)
    generation = workflow.lineage[since]
    table = grow_tables(config(sizes[:1]), config(sizes[1:]), generation, workflow)["t_cat_0"]

    expected = {}
    for row in range(sizes[1]):
        if row >= then:
            hashed = int(murmur3_int(np.array([10 * (row - column.reserved_ids)]))[0])
            expected[row] = 2 + hashed % column.oov_ids if row < now else 2
    begin = data.draw(st.integers(0, sizes[1]))
    end = data.draw(st.integers(begin, sizes[1]))  # a shard
    rows, origins = table.list_new_rows(begin, end)
    assert dict(zip(rows.tolist(), origins.tolist(), strict=True)) == {
        row: origin for row, origin in expected.items() if begin <= row < end
    }
    assert len(set(rows.tolist())) == len(rows)
    kept = set(range(begin, end)) - set(rows.tolist())
    assert all(row < min(table.kept, sizes[0]) for row in kept), "each is in the checkpoint"
    assert all(origin < sizes[0] for origin in origins.tolist())


def grown(then: int, now: int, values: list[int]) -> GrownTable:
    """A table of a run with --hash_indices, whose column has so many values by generation."""
    workflow = lineage(values, CategoricalColumn("cat_0", raw="int"))
    tables = (dataclasses.replace(config([rows]), hash_indices=True) for rows in (then, now))
    return grow_tables(*tables, workflow.lineage[0], workflow)["t_cat_0"]


def test_ids_that_share_rows():
    """They keep their rows while the table keeps its size; rows without an id are for new ones."""
    for values in ([40, 40], [40, 41]):
        table = grown(20, 20, values)
        assert table.kept == 20
        assert not len(table.list_new_rows(0, 20)[0])
    rows, _ = grown(50, 50, [40, 60]).list_new_rows(0, 50)
    assert rows.tolist() == list(range(43, 50))
    assert grown(43, 50, [40, 60]).kept == 43  # no rows were shared
    for then, now in ((20, 30), (50, 40)):
        with pytest.raises(SettingsError, match=r"column cat_0 had 43 ids.*\n.*--max_table_size"):
            grown(then, now, [40, 60])


def test_a_column_that_the_workflow_lacks():
    workflow = lineage([3], CategoricalColumn("cat_0", raw="int"))
    two = dataclasses.replace(config([6, 6]), categorical=("cat_0", "cat_9"))
    with pytest.raises(SchemaError, match="no categorical column cat_9"):
        grow_tables(two, two, workflow.lineage[0], workflow)
