"""Outputs that differ are found, whatever differs; ties may be ordered otherwise, nothing else."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.etl.verify import DifferentOutputError, Output, compare, parts

COUNTS = np.array([5, 3, 3, 1, 1])  # two pairs of ties
VALUES = np.array([90, 10, 20, 30, 40])
IDS = np.repeat(np.arange(3, 8), COUNTS)
COLUMNS = {
    "label": np.arange(15) % 2 == 0,
    "int_0": np.linspace(-3, 3, 15),
    "cat_0": np.concatenate([IDS, [1, 2]])[:15],
}


def output(directory: Path, counts=COUNTS, values=VALUES, order=None, **changed) -> Output:
    columns = {**COLUMNS, **changed}
    kinds = {"label": np.float32, "int_0": np.float32, "cat_0": np.int32}
    table = pa.table({name: np.asarray(c).astype(kinds[name]) for name, c in columns.items()})
    table = table.take(np.arange(len(table)) if order is None else order)
    directory.mkdir(parents=True)
    for i, at in enumerate(range(0, len(table), 4)):  # parts 0 … 3
        pq.write_table(table.slice(at, 4), directory / f"part.{i}.parquet")
    files = parts(directory)
    return Output([files[:2], files[2:]], lambda name: counts, lambda name: values)


def check(tmp_path: Path, *, same_ties: bool = True, same_order: bool = True, **changed):
    ours = output(tmp_path / "ours")
    theirs = output(tmp_path / "theirs", **changed)
    return compare(
        ours, theirs, "label", ["int_0"], ["cat_0"], same_ties=same_ties, same_order=same_order
    )


def swapped(ids: np.ndarray, a: int, b: int) -> np.ndarray:
    return np.where(ids == a, b, np.where(ids == b, a, ids))


def test_equal_outputs_are_summed_up(tmp_path: Path):
    summary = check(tmp_path, int_0=COLUMNS["int_0"] + 2e-6)
    assert (summary.rows, summary.vocabulary) == (15, 5)
    assert (summary.null, summary.oov) == (1, 1)
    assert "15 rows, 5 values" in str(summary)


def test_parts_are_read_in_the_order_of_their_numbers(tmp_path: Path):
    for number in (10, 9, 0):
        (tmp_path / f"part.{number}.parquet").touch()
    assert [path.name for path in parts(tmp_path)] == [f"part.{n}.parquet" for n in (0, 9, 10)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"label": COLUMNS["label"] ^ (np.arange(15) == 7)}, "label: values differ by up to 1"),
        ({"int_0": COLUMNS["int_0"] + 1e-4 * (np.arange(15) == 14)}, "int_0: values differ"),
        ({"int_0": np.where(np.arange(15) == 3, np.nan, 0)}, "int_0: values differ"),
        ({"cat_0": swapped(COLUMNS["cat_0"], 4, 5)}, "cat_0: ids differ"),
        ({"counts": np.array([5, 3, 2, 2, 1])}, "cat_0: another vocabulary"),
        ({"counts": COUNTS[:4]}, "4 values, and not 5"),
        ({"values": VALUES[::-1]}, "cat_0: the vocabulary's values differ"),
        ({name: column[:14] for name, column in COLUMNS.items()}, "14 rows, and not 15"),
    ],
)
def test_any_difference_is_found(tmp_path: Path, changed: dict, said: str):
    with pytest.raises(DifferentOutputError, match=re.escape(said)):
        check(tmp_path, **changed)


def test_ties_may_be_in_another_order_where_that_is_asked_for(tmp_path: Path):
    assert check(tmp_path, same_ties=False, cat_0=swapped(COLUMNS["cat_0"], 4, 5)).rows == 15


@pytest.mark.parametrize(
    "ids",
    [
        swapped(COLUMNS["cat_0"], 3, 4),  # not equally frequent
        np.where(np.arange(15) == 5, 5, COLUMNS["cat_0"]),  # one row of a tie only
        swapped(COLUMNS["cat_0"], 1, 2),  # null and out of vocabulary
        np.where(np.arange(15) == 5, 8, COLUMNS["cat_0"]),  # past the vocabulary
        np.where(np.arange(15) == 5, -1, COLUMNS["cat_0"]),
    ],
)
def test_ids_that_are_no_renaming_of_ties_are_found(tmp_path: Path, ids: np.ndarray):
    with pytest.raises(DifferentOutputError, match="cat_0: ids differ"):
        check(tmp_path, same_ties=False, cat_0=ids)


SHUFFLED = np.concatenate([np.arange(8)[::-1], 8 + np.array([3, 1, 0, 2, 6, 5, 4])])


def test_rows_of_a_split_may_be_in_another_order_where_that_is_asked_for(tmp_path: Path):
    assert check(tmp_path, same_order=False, order=SHUFFLED).rows == 15
    with pytest.raises(DifferentOutputError):
        check(tmp_path / "strict", order=SHUFFLED)


@pytest.mark.parametrize(
    "changed",
    [
        {"order": np.arange(15)[::-1]},  # rows of one split in the other
        {"cat_0": swapped(COLUMNS["cat_0"], 4, 5)},
        {"label": np.roll(COLUMNS["label"], 1)},  # as many of each, with other ids
        {"cat_0": np.roll(COLUMNS["cat_0"], 1)},
        {"int_0": COLUMNS["int_0"] + 1e-3 * (np.arange(15) == 3)},
    ],
)
def test_differences_are_found_in_any_order(tmp_path: Path, changed: dict):
    with pytest.raises(DifferentOutputError):
        check(tmp_path, same_order=False, **changed)
