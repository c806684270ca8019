"""The benchmark of the ETL: its log, its peers, and the comparison of what they write."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.etl import systems
from benchmarks.etl.systems import POLARS, find_python, make_log
from benchmarks.etl.verify import DifferentOutputError, compare, list_parts
from benchmarks.process import run as measured
from nvt_torchrec.etl.run import run
from tests.etl.runs import settings
from tests.logs import CRITEO, write_log

# ---- the log


def test_the_log_is_made_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    make_log(log, 800)
    before = (log / "day_0").stat().st_mtime_ns
    make_log(log, 800)
    assert (log / "day_0").stat().st_mtime_ns == before
    (log / "done").unlink()  # interrupted: it is made again
    make_log(log, 800)
    assert (log / "day_0").stat().st_mtime_ns != before


# ---- the programs


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("log")
    write_log(directory / "raw", [200, 100, 61])
    run(settings(directory / "raw", directory / "ours"))
    return directory


COLUMNS = CRITEO.label, CRITEO.dense_names, CRITEO.categorical_names


@pytest.mark.parametrize("stage", ["memory", "disk"])
def test_polars_writes_what_we_write(log: Path, stage: str) -> None:
    if not find_python(POLARS).exists():
        pytest.skip("its environment is not built: `make bench-etl` builds it")
    system = systems.make_peer_system(
        "polars", POLARS, log / "raw", 361, log / stage, "--stage", stage
    )
    assert not measured(system.command, result=system.result).error
    ours, theirs = systems.list_output(log / "ours"), systems.list_output(log / stage)
    assert compare(ours, theirs, 300, *COLUMNS).startswith("361 rows")


def test_our_command_is_the_product_itself(log: Path) -> None:
    system = systems.make_etl_system(
        "ours", log / "again", "--engine", "cpu", "--input_path", log / "raw"
    )
    assert measured(system.command, result=system.result).output == {"rows": 361}
    ours, again = systems.list_output(log / "ours"), systems.list_output(log / "again")
    assert compare(ours, again, 300, *COLUMNS).startswith("361 rows")


# ---- the comparison

COUNTS = np.array([5, 3, 3, 1, 1])  # of 13 training rows; two pairs of ties
WRITTEN = {
    "label": np.arange(15) % 2 == 0,
    "int_0": np.linspace(-3, 3, 15),
    "cat_0": np.concatenate([np.repeat(np.arange(3, 8), COUNTS), [1, 2]]),
}


def write(directory: Path, **changed) -> list[Path]:
    columns = {**WRITTEN, **changed}
    kinds = {"label": np.float32, "int_0": np.float32, "cat_0": np.int32}
    table = pa.table({name: np.asarray(c).astype(kinds[name]) for name, c in columns.items()})
    (directory / "train").mkdir(parents=True)
    for i, at in enumerate(range(0, len(table), 4)):  # parts 0 … 3
        pq.write_table(table.slice(at, 4), directory / "train" / f"part.{i}.parquet")
    return list_parts(directory, "train")


def check(tmp_path: Path, *, same_ties: bool = True, **changed) -> str:
    ours, theirs = write(tmp_path / "ours"), write(tmp_path / "theirs", **changed)
    return compare(ours, theirs, 13, "label", ["int_0"], ["cat_0"], same_ties=same_ties)


def swapped(ids: np.ndarray, a: int, b: int) -> np.ndarray:
    return np.where(ids == a, b, np.where(ids == b, a, ids))


def test_equal_outputs_are_summed_up(tmp_path: Path) -> None:
    summary = check(tmp_path, int_0=WRITTEN["int_0"] + 2e-6)
    assert summary.startswith("15 rows, 5 values in the vocabularies, 1 null and 1 out-of-vocab")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"label": WRITTEN["label"] ^ (np.arange(15) == 7)}, "label: values differ by up to 1"),
        ({"int_0": WRITTEN["int_0"] + 1e-4 * (np.arange(15) == 14)}, "int_0: values differ"),
        ({"int_0": np.where(np.arange(15) == 3, np.nan, 0)}, "int_0: values differ"),
        ({"cat_0": swapped(WRITTEN["cat_0"], 4, 5)}, "cat_0: ids differ"),
        ({name: column[:14] for name, column in WRITTEN.items()}, "14 rows instead of 15"),
    ],
)
def test_any_difference_is_found(tmp_path: Path, changed: dict, said: str) -> None:
    with pytest.raises(DifferentOutputError, match=re.escape(said)):
        check(tmp_path, **changed)


def test_ties_may_be_in_another_order_where_that_is_asked_for(tmp_path: Path) -> None:
    assert check(tmp_path, same_ties=False, cat_0=swapped(WRITTEN["cat_0"], 4, 5))
    with pytest.raises(DifferentOutputError, match="cat_0: ids differ"):  # of other counts
        check(tmp_path / "other", same_ties=False, cat_0=swapped(WRITTEN["cat_0"], 3, 4))
