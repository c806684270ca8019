"""Lines of descent: what a generation holds, and what reading and extending refuse."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec import workflows
from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.formats.generations import read_reused
from nvt_torchrec.workflows.extension.state import read_state
from nvt_torchrec.workflows.extension.workflow import DayCounts
from nvt_torchrec.workflows.lookup import id_of, meaning_of
from nvt_torchrec.workflows.writer import write_workflow
from tests.mutations import expect_own_errors
from tests.workflows.line import SPEC, day, edit, fitted, run, write_line
from tests.workflows.test_extension import extend, write_base


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_line(tmp_path_factory.mktemp("line"))


@pytest.fixture
def copy(line: Path, tmp_path: Path) -> Path:
    return shutil.copytree(line / "2", tmp_path / "copy")


def test_generations(line: Path) -> None:
    descriptions = [workflows.inspect(line / str(g) / "workflow") for g in range(3)]
    last = descriptions[-1]
    assert [one.generation for one in descriptions] == [0, 1, 2]
    assert [one.digest for one in last.lineage] == [one.digest for one in descriptions]
    assert [one.parent for one in descriptions] == [None, *(d.digest for d in descriptions[:-1])]
    assert [one.days for one in last.lineage] == [(3, 4), (6,), (7,)]
    assert last.lineage[2].values == {"cat_0": 3, "user": 3, "item": 2, "city": 0}
    assert last.lineage[2].reused == {"cat_0": 0, "user": 0, "item": 1, "city": 0}
    assert last.ancestor(descriptions[1].digest) == last.lineage[1]
    assert last.ancestor("0" * 64) is None
    assert descriptions[0].ancestor(last.digest) is None
    workflow = line / "2" / "workflow"
    assert {k: v.tolist() for k, v in last.reused_ids(0).items()} == {"item": [3]}
    assert {k: v.tolist() for k, v in last.reused_ids(1).items()} == {"item": [3]}
    assert last.reused_ids(2) == {}
    assert id_of(workflow, "item", "e").id == 3
    assert id_of(workflow, "item", "a").kind == "oov"
    assert meaning_of(workflow, "user", 5).value == "9"
    assert meaning_of(workflow, "user", 4).count == 3
    assert last.statistics["price"]["mean"] == pytest.approx(np.mean([1, 2, 3, 10, 20, 10, 20]))
    assert descriptions[1].statistics == descriptions[0].statistics


def test_ids_that_are_reused_twice_and_carried_on(line: Path, tmp_path: Path) -> None:
    """Generation 3 gives both ids away; the file of generation 2 is carried over as it is."""
    description = extend(
        line / "2", tmp_path / "3", day(20, item={"x": 5, "y": 3}), retire_after_days=5
    )
    workflow = tmp_path / "3" / "workflow"
    assert {k: v.tolist() for k, v in description.reused_ids(2).items()} == {"item": [3, 4]}
    assert {k: v.tolist() for k, v in description.reused_ids(0).items()} == {"item": [3, 4]}
    # b was last seen on the same day as e, and had the higher count
    assert [id_of(workflow, "item", item).id for item in "xy"] == [3, 4]
    name = "lineage/reused.2.parquet"
    assert (workflow / name).read_bytes() == (line / "2" / "workflow" / name).read_bytes()
    workflows.inspect(workflow).verify()


def test_a_day_that_adds_nothing(line: Path, tmp_path: Path) -> None:
    """Its generation has the digest of its parent, and is the one that is found by it."""
    description = extend(line / "2", tmp_path / "3", day(8, cat_0={7: 1}))
    assert description.digest == workflows.inspect(line / "2" / "workflow").digest
    assert description.ancestor(description.digest).number == 3
    with pytest.raises(SchemaError, match=r"state of generation 2 .*the workflow is generation 3"):
        read_state(line / "2" / "extension", description)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lineage: lineage.pop(), "the digest of the last generation is not"),
        (lambda lineage: lineage.pop(0), r"lineage\[0\] is generation 1"),
        (lambda lineage: lineage.reverse(), r"lineage\[0\] is generation 2"),
        (lambda lineage: lineage[1]["days"].append(7), "generation 2 counted day 7 after day 7"),
        (lambda lineage: lineage[0].update(days=[]), "generation 0: its days"),
        (lambda lineage: lineage[0].update(days=[4, 3]), "generation 0: its days"),
        (lambda lineage: lineage[2]["values"].update(cat_0=4), "other numbers of values"),
        (lambda lineage: lineage[1]["values"].update(cat_0=9), "fewer values of 'cat_0'"),
        (lambda lineage: lineage[1]["values"].pop("user"), "other vocabularies than the spec"),
        (lambda lineage: lineage[0]["reused"].update(item=1), "generation 0 reused ids"),
        (lambda lineage: lineage[2]["reused"].update(item=3), "more ids of 'item' were reused"),
        (lambda lineage: lineage[2]["reused"].update(item=0), "reused.2.parquet' is unknown"),
        (lambda lineage: lineage[1]["reused"].update(item=1), "reused.1.parquet' is missing"),
        (lambda lineage: lineage[1].update(digest="x"), "'x' is not a digest"),
        (lambda lineage: lineage[1].pop("reused"), r"lineage\[1\].reused is missing"),
    ],
)
def test_damaged_lineage(copy: Path, change, message: str) -> None:
    edit(copy / "workflow" / "metadata.json", lambda value: change(value["lineage"]))
    with pytest.raises(BadInputError, match=rf"metadata.json: damaged: .*{message}"):
        workflows.inspect(copy / "workflow")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"vocabulary": ["item"], "id": [2]}), "ids that are not those"),
        (pa.table({"vocabulary": ["item"], "id": [5]}), "ids that are not those"),
        (pa.table({"vocabulary": ["item", "item"], "id": [3, 4]}), "not the numbers of ids"),
        (pa.table({"vocabulary": ["user"], "id": [3]}), "not the numbers of ids"),
        (pa.table({"vocabulary": ["item"], "id": pa.array([3], pa.int32())}), "columns"),
        (
            pa.table({"vocabulary": ["item"], "id": pa.array([None], pa.int64())}),
            "columns.* nulls",
        ),
    ],
)
def test_damaged_reused_ids(copy: Path, table: pa.Table, message: str) -> None:
    """As of a workflow whose digests are made to match."""
    last = workflows.inspect(copy / "workflow").lineage[-1]
    file = copy / "workflow" / "lineage" / "reused.2.parquet"
    pq.write_table(table, file)
    with pytest.raises(BadInputError, match=rf"reused.2.parquet: damaged: {message}"):
        read_reused(file, last, {"item": 3, "user": 3})


def test_any_metadata(copy: Path) -> None:
    """Changes of the lineage, among others, are refused or give a workflow that works."""
    workflow = copy / "workflow"

    def use() -> None:
        description = workflows.inspect(workflow)
        description.reused_ids(0)
        assert description.ancestor(description.digest) is not None or not description.lineage

    expect_own_errors(workflow / "metadata.json", use, rounds=300)


def _extend_copy(copy: Path, **options) -> None:
    extend(copy, copy / "next", day(9, item={"b": 1}), **options)


def test_a_workflow_without_a_line_of_descent(tmp_path: Path) -> None:
    write_base(tmp_path, SPEC, fitted(), [3])
    edit(tmp_path / "workflow" / "metadata.json", lambda value: value.pop("lineage"))
    description = workflows.inspect(tmp_path / "workflow")
    assert (description.generation, description.parent, description.lineage) == (None, None, ())
    assert workflows.compiled.load(tmp_path / "workflow").digest == description.digest
    with pytest.raises(BadInputError, match=r"does not say which days.*\n.*fit it again with"):
        _extend_copy(tmp_path)
    assert "line of descent\n  unknown: it was imported" in run(
        "inspect", tmp_path / "workflow"
    ).stdout  # fmt: skip
    state = fitted()
    imported = write_workflow(tmp_path / "imported", SPEC, state)
    assert imported.lineage == ()
    assert "lineage" not in json.loads((tmp_path / "imported" / "metadata.json").read_text())


@pytest.mark.parametrize(
    ("options", "number", "message"),
    [
        ({}, 7, "day 7 is not after day 7"),
        ({}, 5, "day 5 is not after day 7"),
        ({"retire_after_days": 0}, 8, "values retire after 0 days"),
    ],
)
def test_days_and_settings_that_are_refused(
    line: Path, tmp_path: Path, options: dict, number: int, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        extend(line / "2", tmp_path, day(number), **options)
    assert not list(tmp_path.iterdir())


def test_moments_that_were_not_counted(line: Path, tmp_path: Path) -> None:
    counts = DayCounts(8, {}, {}, None)
    with pytest.raises(SchemaError, match="moments of the dense columns of day 8 were not counted"):
        extend(line / "2", tmp_path, counts)


def test_the_state_of_another_generation(copy: Path, line: Path) -> None:
    shutil.rmtree(copy / "extension")
    with pytest.raises(BadInputError, match=r"state.json: no such file"):
        _extend_copy(copy)
    shutil.copytree(line / "1" / "extension", copy / "extension")
    with pytest.raises(SchemaError, match=r"state of generation 1 with digest"):
        _extend_copy(copy)
    assert not (copy / "next").exists()


def test_any_state(copy: Path) -> None:
    description = workflows.inspect(copy / "workflow")
    expect_own_errors(
        copy / "extension" / "state.json",
        lambda: read_state(copy / "extension", description),
        rounds=300,
    )


@pytest.mark.parametrize(
    "name", ["pending.item.parquet", "pending.user.parquet", "seen.item.parquet"]
)
def test_a_damaged_file_of_the_state(copy: Path, name: str) -> None:
    file = copy / "extension" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(BadInputError, match=f"{name}: not the file that was written"):
        _extend_copy(copy)
    file.unlink()
    with pytest.raises(BadInputError, match=f"{name}: missing"):
        _extend_copy(copy)


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("pending.item", {"value": ["d", "a", "c"]}, "not in ascending order"),
        ("pending.item", {"value": ["a", "a", "c"]}, "not in ascending order"),
        ("pending.item", {"value": ["a"], "count": [1], "last_day": [4]}, "1 values instead of"),
        ("pending.item", {"count": [0, 1, 1]}, "a count is below 1"),
        ("pending.item", {"last_day": [4, 8, 4]}, "not one that was counted"),
        ("pending.item", {"last_day": [4, None, 4]}, "it has nulls"),
        ("seen.item", {"last_day": [4]}, "1 days for 2 values"),
        ("seen.item", {"last_day": [4, -1]}, "not one that was counted"),
    ],
)
def test_state_that_cannot_be(copy: Path, name: str, columns: dict, message: str) -> None:
    """Files whose digests are right."""
    file = copy / "extension" / f"{name}.parquet"
    table = pq.read_table(file)
    kinds = {field.name: field.type for field in table.schema}
    found = table.to_pydict() | columns
    if name == "pending.item":
        found = {key: column[: len(columns.get("value", "acd"))] for key, column in found.items()}
    pq.write_table(pa.table({k: pa.array(found[k], kinds[k]) for k in kinds}), file)
    data = file.read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(copy / "extension" / "state.json", lambda value: value["files"].update({file.name: entry}))
    with pytest.raises(BadInputError, match=f"{file.name}: damaged: .*{message}"):
        _extend_copy(copy)
