"""``python -m etl check`` of data made elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.etl.commands.check import check
from nvt_torchrec.formats.schema import TableSchema
from tests.etl.findings import bad, only, set_value


def _elsewhere(directory: Path, splits: dict[str, int], seed: int = 0, ids: int = 1000) -> Path:
    """Parquet with a schema and nothing else, as other tools write it: nullable, by pandas."""
    rng = np.random.default_rng(seed)
    schema = TableSchema("click", ("price",), ("item", "user"), (ids, ids))
    for split, rows in splits.items():
        table = pa.table(
            {
                "click": to_arrow((rng.random(rows) < 0.3).astype(np.float32)),
                "price": to_arrow(rng.normal(size=rows).round(1).astype(np.float32)),
                "item": to_arrow(rng.integers(0, ids, rows, dtype=np.int32)),
                "user": to_arrow(rng.integers(0, ids, rows, dtype=np.int32)),
            }
        )
        (directory / split).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, directory / split / "0.parquet")
        schema.write(directory / split)
    return directory


def test_made_elsewhere(tmp_path: Path) -> None:
    directory = _elsewhere(tmp_path / "data", {"train": 3000, "valid": 500, "test": 500})
    (found,) = check(directory)
    assert "note: " in str(found)
    assert "no manifest.json: made elsewhere" in str(found)
    assert bad(directory / "train") == []  # one split alone


def test_without_a_schema(tmp_path: Path) -> None:
    """Values are still checked as far as they can be."""
    directory = _elsewhere(tmp_path / "data", {"train": 300})
    shutil.rmtree(directory / "train" / ".merlin")
    assert "no .merlin/schema.json" in only(directory, "schema")
    table = pq.read_table(directory / "train" / "0.parquet")
    pq.write_table(set_value("price", 2, float("nan"))(table), directory / "train" / "0.parquet")
    assert any("row 2, column price: nan" in one for one in bad(directory))


def test_an_empty_split(tmp_path: Path) -> None:
    directory = _elsewhere(tmp_path / "data", {"train": 300, "valid": 0, "test": 10})
    assert "valid: no rows" in only(directory, "splits")


def test_lists(tmp_path: Path) -> None:
    """Ids in lists: range, nulls, nested row numbers; empty lists are fine."""
    schema = TableSchema("label", (), ("tags",), (10,), ("tags",))
    directory = tmp_path / "data" / "train"

    def write(lists: list) -> None:
        kind = pa.list_(pa.int32())
        table = pa.table({"label": pa.array([i % 2 for i in range(len(lists))], pa.float32())})
        pq_table = table.append_column("tags", pa.array(lists, kind))
        directory.mkdir(parents=True, exist_ok=True)
        pq.write_table(pq_table, directory / "0.parquet", write_statistics=False)
        schema.write(directory)

    write([[1, 9], [], [3]])
    assert bad(directory) == []
    write([[1, 9], [], [3], [4, 10, 11]])
    found = only(directory, "id range")
    assert "row 3, column tags: id 10, the table has 10 rows (2 such in the row group)" in found
    write([[1, 9], [2, None]])
    assert "row 1, column tags: a null in a list" in only(directory, "nulls")
    write([[1, 9], None])
    assert "row 1, column tags: a null" in only(directory, "nulls")


@pytest.mark.parametrize(
    ("column", "value", "kind", "what"),
    [
        ("bought", 0.5, "labels", "row 2, column bought: label 0.5"),
        ("w", -0.25, "weights", "row 2, column w: weight -0.25"),
        ("w", float("inf"), "not finite", "row 2, column w: inf"),
        ("w", float("nan"), "not finite", "row 2, column w: nan"),
    ],
)
def test_more_labels_and_a_weight(
    tmp_path: Path, column: str, value: float, kind: str, what: str
) -> None:
    directory = tmp_path / "data" / "train"
    schema = TableSchema(("label", "bought"), ("x",), ("item",), (10,), weight="w")
    schema.write(directory)
    row = {"label": 0.0, "bought": 1.0, "w": 0.0, "x": -1.0, "item": 1}
    rows = [row, row | {"label": 1.0, "w": 2.5}, row | {"bought": 0.0}]
    pq.write_table(pa.Table.from_pylist(rows, schema.arrow), directory / "0.parquet")
    assert bad(directory) == []
    rows[2] = rows[2] | {column: value}
    pq.write_table(pa.Table.from_pylist(rows, schema.arrow), directory / "0.parquet")
    assert what in only(directory, kind)


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    directory = tmp_path / "data" / "train"
    TableSchema("label", ("x",), ("item",), (10,)).write(directory)
    numbers, ids = pa.array([0.0, 1.0], pa.float32()), pa.array([1, 2], pa.int32())
    table = pa.Table.from_arrays([numbers, numbers, numbers, ids], ["label", "x", "x", "item"])
    pq.write_table(table, directory / "0.parquet")
    assert "column x: occurs 2 times" in only(directory, "columns")
