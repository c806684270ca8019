"""What a run leaves for extensions: generation 0 of the workflow, and its state."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.etl.engines.engine import Job, add_up
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.units.unit_plan import make_plan
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.extension.state import read_state
from nvt_torchrec.workflows.moments import COUNT, statistics
from tests.etl.runs import failing, settings, tree, write_parquet
from tests.workflows.random_specs import Oracle, random_raw_rows

#: Vocabularies that a policy bounds and others, of every raw type, shared, of lists and hashed.
SPEC = FeatureSpec(
    "label",
    (DenseColumn("price", raw="float", fill=0.5), DenseColumn("age", fill=-1)),
    (
        CategoricalColumn("exact"),
        CategoricalColumn("rare", freq_threshold=4),
        CategoricalColumn("user", raw="int", max_table_size=6, vocabulary="users"),
        CategoricalColumn(
            "friends", raw="int", max_table_size=6, vocabulary="users", multi_hot=True
        ),
        CategoricalColumn("word", raw="string", freq_threshold=3, num_buckets=2),
        CategoricalColumn("tags", raw="string", max_table_size=7, multi_hot=True),
        CategoricalColumn("city", raw="string", hash_buckets=5),
    ),
    input=InputFormat("parquet"),
)
SIZES = [70, 60, 20]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RawRows]]:
    directory = tmp_path_factory.mktemp("log") / "raw"
    directory.mkdir()
    days = [random_raw_rows(SPEC, rows, 7 + day) for day, rows in enumerate(SIZES)]
    for day, rows in enumerate(days):
        write_parquet(directory / f"day_{day}.parquet", SPEC, rows)
    return directory, days


@pytest.fixture(scope="module")
def done(raw, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("etl") / "out"
    run(settings(raw[0], output, SPEC))
    return output


def _check(output: Path, spec: FeatureSpec, train: list[RawRows]) -> None:
    """Pending values, counts and moments are those of the training days."""
    description = inspect(output / "workflow")
    assert description.generation == 0
    assert description.lineage[0].days == tuple(range(len(train)))
    state = read_state(output / "extension", description)
    oracle = Oracle(spec, train)
    waiting = 0
    for name, columns in spec.vocabularies.items():
        if columns[0].hash_buckets:
            continue
        pending = state.pending[name]
        expected = {v: n for v, n in oracle.counts[name].items() if v not in oracle.ids[name]}
        found = dict(zip(pending.values.tolist(), pending.counts.tolist(), strict=True))
        assert found == expected
        waiting += len(found)
    assert waiting > 5
    assert state.moments[:, COUNT].tolist() == [sum(map(len, train))] * len(spec.dense)
    assert statistics(state.moments, spec) == description.statistics


def test_state_of_the_cpu_engine(raw, done: Path) -> None:
    _check(done, SPEC, raw[1][:-1])


def test_workers_that_write_elsewhere(raw, tmp_path: Path) -> None:
    blocks = make_plan(find_days(str(raw[0])), SPEC, block_bytes=1 << 20).train_blocks
    with pytest.raises(BadInputError, match=r"2 of 2 blocks were not counted there\n.*same path"):
        add_up(Job(SPEC, tmp_path), blocks, lambda *_: None)


@pytest.mark.parametrize("lost", ["state.json", "pending.users.parquet"])
def test_a_lost_state_is_made_again(raw, done: Path, tmp_path: Path, lost) -> None:
    """A run that was ended between fitting and transforming, and then lost a file."""
    output = tmp_path / "out"
    with failing("nvt_torchrec.etl.engines.host.Threads.encode", OSError("the plug is pulled")):
        run(settings(raw[0], output, SPEC))
    assert tree(output / "extension") == tree(done / "extension")
    (output / "extension" / lost).unlink()
    run(settings(raw[0], output, SPEC))
    assert tree(output / "extension") == tree(done / "extension")
    assert tree(output / "workflow") == tree(done / "workflow")
