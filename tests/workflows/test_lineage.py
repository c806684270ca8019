"""Lines of descent: what a generation holds, what is refused, and what the commands show."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SchemaError
from nvt_torchrec.formats.day_names import format_days
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.extend_workflow import DayCounts
from nvt_torchrec.workflows.extension_state import read_state
from nvt_torchrec.workflows.inspection import report
from nvt_torchrec.workflows.vocabulary import apply_policy
from nvt_torchrec.workflows.writer import Fitted
from tests.mutations import edit_json, expect_own_errors, flip_bit
from tests.workflows.random_specs import as_columns
from tests.workflows.test_extension import extend, write_base

SPEC = FeatureSpec(
    "label",
    (DenseColumn("price", raw="float"),),
    (
        CategoricalColumn("cat_0"),
        CategoricalColumn("user", raw="int", freq_threshold=3),
        CategoricalColumn("item", raw="string", max_table_size=5),
        CategoricalColumn("city", raw="string", hash_buckets=10),
    ),
)


def fitted() -> Fitted:
    """item: a and b have the ids 3 and 4, c and d none; user: 5 has none."""
    counted = {
        "cat_0": apply_policy(np.array([7, 8]), np.array([9, 4]), SPEC.categorical[0], 1),
        "user": apply_policy(np.array([5, 1]), np.array([2, 6]), SPEC.categorical[1], 0),
        "item": apply_policy(
            pa.array(["d", "c", "a", "b"]), np.array([1, 2, 9, 5]), SPEC.categorical[2], 0
        ),
        "city": apply_policy(pa.array([], pa.string()), np.empty(0), SPEC.categorical[3], 0),
    }
    return Fitted(
        {"price": {"mean": 2.0, "std": 1.0}},
        {name: own for name, (own, _) in counted.items()},
        {name: pending for name, (_, pending) in counted.items()},
    )


def day(number: int, **values: dict) -> DayCounts:
    return DayCounts(
        number,
        {
            name: as_columns(own, "string" if name == "item" else "int")
            for name, own in values.items()
        },
        {"cat_0": 2},
    )


def write_line(root: Path) -> Path:
    """Write directories 0, 1 and 2; the table of items is full from the start."""
    write_base(root / "0", SPEC, fitted(), [3, 4])
    extend(root / "0", root / "1", day(6, cat_0={0x99: 1, 7: 1}, user={5: 1, 9: 2}, item={"b": 1}))
    last = day(7, user={9: 1}, item={"e": 2, "b": 1})
    extend(root / "1", root / "2", last)
    return root


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_line(tmp_path_factory.mktemp("line"))


@pytest.fixture
def copy(line: Path, tmp_path: Path) -> Path:
    return shutil.copytree(line / "2", tmp_path / "copy")


def test_generations(line: Path) -> None:
    descriptions = [inspect(line / str(g) / "workflow") for g in range(3)]
    last = descriptions[-1]
    assert [one.generation for one in descriptions] == [0, 1, 2]
    assert [one.digest for one in last.lineage] == [one.digest for one in descriptions]
    assert [one.parent for one in descriptions] == [None, *(d.digest for d in descriptions[:-1])]
    assert [one.days for one in last.lineage] == [(3, 4), (6,), (7,)]
    assert last.lineage[2].values == {"cat_0": 3, "user": 3, "item": 2, "city": 0}
    assert last.ancestor(descriptions[1].digest) == last.lineage[1]
    assert last.ancestor("0" * 64) is None
    assert descriptions[0].ancestor(last.digest) is None
    values = {c.name: last.read_values(c)[0].to_pylist() for c in last.spec.categorical[:3]}
    assert values["item"] == ["a", "b"]
    assert values["user"][-1] == 9
    assert last.statistics == descriptions[0].statistics


def test_a_day_that_adds_nothing(line: Path, tmp_path: Path) -> None:
    """Its generation has the digest of its parent, and is the one that is found by it."""
    description = extend(line / "2", tmp_path / "3", day(8, cat_0={7: 1}))
    assert description.digest == inspect(line / "2" / "workflow").digest
    assert description.ancestor(description.digest).number == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lineage: lineage.pop(), "the last generation of the lineage is not"),
        (lambda lineage: lineage.pop(0), r"lineage\[0\] is not generation 0"),
        (lambda lineage: lineage[0].update(days=[4, 3]), "generation 0: its days"),
        (lambda lineage: lineage[1]["values"].pop("user"), r"lineage\[1\] is not generation 1"),
    ],
)
def test_damaged_lineage(copy: Path, change, message: str) -> None:
    edit_json(copy / "workflow" / "metadata.json", lambda value: change(value["lineage"]))
    with pytest.raises(BadInputError, match=rf"metadata.json: damaged: .*{message}"):
        inspect(copy / "workflow")


def test_any_metadata(copy: Path) -> None:
    """Changes of the lineage, among others, are refused or give a workflow that works."""
    workflow = copy / "workflow"

    def use() -> None:
        description = inspect(workflow)
        assert description.ancestor(description.digest) is not None or not description.lineage

    expect_own_errors(workflow / "metadata.json", use, rounds=300)


def _expect_refusal(copy: Path, message: str, error: type[ClickLogError] = BadInputError) -> None:
    """Extend the workflow by a day, which must fail."""
    with pytest.raises(error, match=message):
        extend(copy, copy / "next", day(9, item={"b": 1}))


def test_the_state_of_another_generation(copy: Path, line: Path) -> None:
    shutil.rmtree(copy / "extension")
    _expect_refusal(copy, r"state.json: no such file")
    shutil.copytree(line / "1" / "extension", copy / "extension")
    _expect_refusal(copy, r"belongs to generation 1 with digest", SchemaError)
    assert not (copy / "next").exists()


def test_any_state(copy: Path) -> None:
    description = inspect(copy / "workflow")
    expect_own_errors(
        copy / "extension" / "state.json",
        lambda: read_state(copy / "extension", description),
        rounds=300,
    )


@pytest.mark.parametrize("name", ["pending.item.parquet", "pending.user.parquet"])
def test_a_damaged_file_of_the_state(copy: Path, name: str) -> None:
    file = copy / "extension" / name
    flip_bit(file)
    _expect_refusal(copy, f"{name}: not the file that was written")
    file.unlink()
    _expect_refusal(copy, f"{name}: missing")


def test_a_state_of_an_earlier_version(copy: Path) -> None:
    """Its days on which values were last seen are not read."""
    state = copy / "extension" / "state.json"
    days = {"bytes": 1, "sha256": "0" * 64}
    edit_json(state, lambda value: value["files"].update({"seen.item.parquet": days}))
    extend(copy, copy / "next", day(9, item={"b": 1}))


def test_full_tables_are_logged(
    line: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nvt_torchrec.workflows.extend_workflow")
    extend(line / "0", tmp_path / "1", day(6, item={"c": 1}))
    assert "generation 1, day 6: 0 values added" in caplog.messages
    assert (
        "at max_table_size: item (2 values wait for an id)\n"
        "  -> `nvt-etl run` on newer days gives ids to newer values" in caplog.messages
    )


def test_inspect_shows_the_line(line: Path) -> None:
    shown = report(line / "2" / "workflow").split("lineage\n")[1]
    lines = [line.split() for line in shown.splitlines()[:4]]
    digests = [one.digest[:12] for one in inspect(line / "2" / "workflow").lineage]
    assert lines == [
        ["generation", "digest", "days", "values", "added"],
        ["0", digests[0], "3-4", "5", "5"],
        ["1", digests[1], "6", "7", "2"],
        ["2", digests[2], "7", "8", "1"],
    ]


def test_days_of_a_dated_log_are_dates() -> None:
    assert format_days([0, 1, 2, 7]) == "0-2, 7"
    assert format_days([20513, 20514, 20516]) == "2026-03-01..2026-03-02, 2026-03-04"
