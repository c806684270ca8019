"""Splits by share, column, time and files, against the rules in plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError, SettingsError
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.etl.plan import make_plan
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.shuffle import round_keys
from nvt_torchrec.etl.split_pass import find_cuts, prepared
from nvt_torchrec.formats.spec.columns import CategoricalColumn, DenseColumn, InputFormat
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.split import Split
from nvt_torchrec.formats.splits import SPLITS
from tests.clicklog.reference_reader import key_of
from tests.etl.findings import bad
from tests.etl.runs import encode, fit, read_split, settings, tree

SPEC = FeatureSpec(
    "label",
    (DenseColumn("row"),),
    (CategoricalColumn("item", raw="string"),),
    dense_transform="log",
    input=InputFormat(format="csv", header=True),
)
BY_TIME = Split("time", column="when", time_format="epoch_s", valid=0.1, test=0.2)
SPLITS_OF_ROWS = {
    "share": Split("share", valid=0.2, test=0.1, seed=7),
    "column": Split("column", column="user", valid=0.2, test=0.2, seed=1),
    "time": BY_TIME,
    "cuts": Split(
        "time",
        column="when",
        time_format="epoch_s",
        valid_from="1970-01-01 00:10:00",
        test_from="1970-01-01 00:12",
    ),
}
#: File, row in the file, number over all files, user, seconds.
Row = tuple[int, int, int, str, int]


def _rows(files: list[int], seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    numbers = itertools.count()
    return [
        (file, row, next(numbers), f"user é{rng.randrange(40)}", rng.randrange(1000))
        for file, count in enumerate(files)
        for row in range(count)
    ]


def _write(directory: Path, rows: list[Row], parquet: bool = False) -> None:
    directory.mkdir(parents=True)
    for file, own in itertools.groupby(rows, lambda row: row[0]):
        values = [(n, n % 2, f"i{n % 9}", user, when) for _, _, n, user, when in own]
        names = ("row", "label", "item", "user", "when")
        if parquet:
            table = pa.table(dict(zip(names, zip(*values, strict=True), strict=True)))
            pq.write_table(table, directory / f"part-{file}.parquet", row_group_size=77)
        else:
            lines = [",".join(names), *(",".join(map(str, value)) for value in values)]
            (directory / f"part-{file}.csv").write_text("\n".join(lines) + "\n")


def _mix(value: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = (value ^ (value >> 33)) * factor % 2**64
    return value ^ (value >> 33)


def _hash(value: int, *seed: int) -> int:
    first, second = (int(key) for key in round_keys(*seed)[:2])
    return _mix((_mix(value % 2**64 ^ first) + second) % 2**64)


def _expected(rows: list[Row], split: Split) -> dict[str, list[int]]:
    """The numbers of the rows of each split."""
    if split.by == "time":
        valid_from, test_from = 600, 720
        if not split.valid_from:
            times = sorted(row[4] for row in rows)
            test = len(rows) - round(len(rows) * split.test)
            valid_from, test_from = times[test - round(len(rows) * split.valid)], times[test]
        sides = [(row[4] >= valid_from) + (row[4] >= test_from) for row in rows]
    elif split.by == "share":
        sides = [_side(_hash(row[1], split.seed, row[0]), split) for row in rows]
    else:
        sides = [_side(_hash(key_of(row[3]), split.seed), split) for row in rows]
    return {
        name: [row[2] for row, side in zip(rows, sides, strict=True) if side == i]
        for i, name in enumerate(SPLITS)
    }


def _side(hashed: int, split: Split) -> int:
    share = hashed / 2**64
    return (share >= 1 - split.valid - split.test) + (share >= 1 - split.test)


def _got(output: Path) -> dict[str, list[int]]:
    return {
        split: np.rint(np.exp(read_split(output, split)["row"]) - 3).astype(int).tolist()
        for split in SPLITS
    }


def _with(split: Split, parquet: bool = False) -> FeatureSpec:
    form = InputFormat(format="parquet") if parquet else SPEC.input
    return dataclasses.replace(SPEC, split=split, input=form)


@pytest.mark.parametrize("name", SPLITS_OF_ROWS)
@given(
    files=st.lists(st.integers(1, 300), min_size=1, max_size=3).filter(lambda n: sum(n) > 150),
    block_bytes=st.sampled_from([900, 4000, 1 << 20]),
    parquet=st.booleans(),
    threads=st.integers(1, 3),
)
@hypothesis_settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_row_goes_where_the_rule_says(
    tmp_path_factory, name: str, files, block_bytes, parquet, threads
) -> None:
    """Also with small blocks, which are many units, and in which a split may have no row."""
    from nvt_torchrec.etl.state import recorded
    from nvt_torchrec.workflows.writer import write_workflow

    directory = tmp_path_factory.mktemp("split")
    rows = _rows(files, seed=sum(files))
    _write(directory / "raw", rows, parquet)
    spec = _with(SPLITS_OF_ROWS[name], parquet)
    days = find_days(str(directory / "raw"), split=spec.split)
    plan = make_plan(days, spec, block_bytes=block_bytes)
    plan = prepared(plan, spec, directory, threads=threads, reject=False)
    fitted = fit(plan.train_blocks, spec, directory / "fit", workers=threads, reject=False)
    write_workflow(directory / "workflow", spec, fitted)
    results = encode(plan, directory / "workflow", directory, workers=threads)
    expected = _expected(rows, spec.split)
    by_unit = {result.unit: result for result in results}
    for split in SPLITS:
        own = [by_unit[unit] for unit in plan.units if unit.split == split]
        assert sum(result.rows for result in own) == len(expected[split])
        files_there = [directory / "parts" / r.unit.file for r in own if r.has_part]
        values = [v for f in files_there for v in pq.read_table(f)["row"].to_pylist()]
        assert np.rint(np.exp(values) - 3).astype(int).tolist() == expected[split]
        assert all((directory / "parts" / r.unit.file).exists() == bool(r.rows) for r in own)
    counted = Counter(f"i{number % 9}" for number in expected["train"])
    found = fitted.vocabularies["item"]
    assert dict(zip(found.values.to_pylist(), found.counts.tolist(), strict=True)) == counted
    assert [r.to_dict() for r in recorded(directory, plan.units)] == [
        by_unit[unit].to_dict() for unit in plan.units
    ]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return _rows([700, 1, 400], seed=3)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> Path:
    directory = tmp_path_factory.mktemp("log") / "raw"
    _write(directory, rows)
    return directory


@pytest.mark.parametrize("name", SPLITS_OF_ROWS)
def test_both_engines_write_the_same_whole_output(
    raw: Path, rows: list[Row], tmp_path: Path, dask_client: Client, name: str
) -> None:
    split = SPLITS_OF_ROWS[name]
    manifest = run(settings(raw, tmp_path / "cpu", _with(split), workers=2))
    address = dask_client.scheduler.address
    run(settings(raw, tmp_path / "dask", _with(split), scheduler=address))
    expected = _expected(rows, split)
    assert _got(tmp_path / "cpu") == expected
    cpu, dask = tree(tmp_path / "cpu"), tree(tmp_path / "dask")
    parts = [file for file in cpu if file.endswith(".parquet")]
    assert len(parts) > 3
    assert all(cpu[file] == dask[file] for file in parts)
    assert {k: own["rows"] for k, own in manifest["splits"].items()} == {
        k: len(own) for k, own in expected.items()
    }
    assert manifest["split"]["by"] == split.by
    assert [file["rows"]["in"] for file in manifest["inputs"]] == [700, 1, 400]
    assert bad(tmp_path / "cpu") == []
    when = {row[2]: row[4] for row in rows}
    user = {row[2]: row[3] for row in rows}
    if split.by == "time":  # no later row is in an earlier split
        times = [[when[number] for number in expected[name]] for name in SPLITS]
        assert max(times[0]) < min(times[1]) <= max(times[1]) < min(times[2])
        cuts = [manifest["split"][key] for key in ("valid_from", "test_from")]
        assert cuts == [f"1970-01-01 00:{min(t) // 60:02}:{min(t) % 60:02}" for t in times[1:]] or (
            name == "cuts"
        )
    if split.by == "column":  # a user is on one side
        users = [{user[number] for number in expected[name]} for name in SPLITS]
        assert sum(map(len, users)) == len(set.union(*users)) == 40


def test_files(raw: Path, rows: list[Row], tmp_path: Path) -> None:
    """The files decide, and the hash of a row's place takes validation out of training."""
    split = Split(
        "files", train_files=("part-0.csv", "part-1*"), test_files=("part-2.csv",), valid=0.3
    )
    manifest = run(settings(raw, tmp_path / "out", _with(split)))
    of_training = [row for row in rows if row[0] < 2]
    sides = [_hash(row[1], 0, row[0]) / 2**64 >= 0.7 for row in of_training]
    assert _got(tmp_path / "out") == {
        "train": [row[2] for row, side in zip(of_training, sides, strict=True) if not side],
        "valid": [row[2] for row, side in zip(of_training, sides, strict=True) if side],
        "test": [row[2] for row in rows if row[0] == 2],
    }
    assert manifest["split"]["train_files"] == ["part-0.csv", "part-1*"]
    three = Split(
        "files", train_files=("part-0.csv",), valid_files=("part-1.csv",), test_files=("part-2*",)
    )
    run(settings(raw, tmp_path / "three", _with(three)))
    assert [len(own) for own in _got(tmp_path / "three").values()] == [700, 1, 400]


def test_files_that_cannot_be_used(raw: Path, tmp_path: Path) -> None:
    def found(**files: tuple[str, ...]) -> None:
        files = {"train_files": ("part-0.csv",), "valid_files": ("part-1.csv",), **files}
        run(settings(raw, tmp_path / "out", _with(Split("files", **files))))

    with pytest.raises(BadInputError, match=r"test = 'x\*' matches no file; there are part-0.csv"):
        found(test_files=("x*",))
    with pytest.raises(BadInputError, match=r"part-0\.csv: is for train and for test"):
        found(test_files=("part-0*",))
    spec = _with(Split("files", train_files=("a",), valid=0.1, test_files=("b",)))
    with pytest.raises(SettingsError, match="--days with a split by files"):
        run(settings(raw, tmp_path / "out", spec, days=frozenset({0})))


def test_bad_rows_are_rejected_once(raw: Path, rows: list[Row], tmp_path: Path) -> None:
    """Also those in a block of which training has no row; lines are those of the file."""
    (tmp_path / "raw").mkdir()
    for path in raw.iterdir():
        (tmp_path / "raw" / path.name).write_bytes(path.read_bytes())
    with open(tmp_path / "raw" / "part-1.csv", "a") as file:
        file.write("1,1,i,u\n1,1,i,u,12:00\n1,1,i,,5\n")
    options = {"on_bad_rows": "quarantine", "max_bad_fraction": 0.1}
    for split in (BY_TIME, SPLITS_OF_ROWS["column"]):
        output = tmp_path / split.by
        manifest = run(settings(tmp_path / "raw", output, _with(split), **options))
        rejected = 2  # a time is read by time only, and a user by column only
        assert manifest["rows"] == {"in": 1101 + 3, "out": 1101 + 3 - rejected, "rejected": 2}
        lines = (output / "rejected" / "part-1.csv.tsv").read_text().splitlines()[1:]
        assert [int(line.split("\t")[1]) for line in lines] == (
            [3, 4] if split.by == "time" else [3, 5]
        )
        assert bad(output) == []
    with pytest.raises(BadRowError, match=r"part-1\.csv, line 3"):
        run(settings(tmp_path / "raw", tmp_path / "stops", _with(BY_TIME)))


def test_shuffled_and_resumed(raw: Path, rows: list[Row], tmp_path: Path, monkeypatch) -> None:
    """The times are not counted again, and the output is the same."""
    spec = _with(BY_TIME)
    run(settings(raw, tmp_path / "whole", spec, shuffle="full", seed=2))
    with monkeypatch.context() as patch:
        patch.setattr("nvt_torchrec.etl.stages.Stages.count_and_encode", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(settings(raw, tmp_path / "out", spec, shuffle="full", seed=2))
    monkeypatch.setattr("nvt_torchrec.etl.split_pass._count_times", _interrupted)
    run(settings(raw, tmp_path / "out", spec, shuffle="full", seed=2, workers=1))
    whole, resumed = tree(tmp_path / "whole"), tree(tmp_path / "out")
    assert whole.keys() == resumed.keys()
    absolute = "_file_list.txt"  # which names the directory
    assert [f for f in whole if whole[f] != resumed[f] and not f.endswith(absolute)] == []
    assert sorted(_got(tmp_path / "out")["train"]) == _expected(rows, spec.split)["train"]


def _interrupted(*args, **options):
    raise KeyboardInterrupt


def test_empty_splits_are_refused(raw: Path, tmp_path: Path) -> None:
    late = dataclasses.replace(
        SPLITS_OF_ROWS["cuts"], valid_from="1970-01-01 00:05", test_from="1971-01-01"
    )
    with pytest.raises(BadInputError, match=r"no row for test; train has \d+.*\n.*time_format"):
        run(settings(raw, tmp_path / "late", _with(late)))
    early = dataclasses.replace(late, valid_from="1969-01-01", test_from="1970-01-01 00:05")
    with pytest.raises(BadInputError, match="no well-formed row is for training"):
        run(settings(raw, tmp_path / "early", _with(early)))


@given(
    blocks=st.lists(st.lists(st.integers(-3, 9), max_size=12), min_size=1, max_size=4),
    valid=st.sampled_from([0.1, 0.3]),
    test=st.sampled_from([0.1, 0.4]),
)
def test_cuts_by_time(blocks: list[list[int]], valid: float, test: float) -> None:
    """As plain Python finds them in a sorted list."""
    times = sorted(time for block in blocks for time in block)
    counted = []
    for block in blocks:
        distinct, counts = np.unique(np.array(block, np.int64), return_counts=True)
        counted.append(np.stack([distinct, np.cumsum(counts)]))
    rows, test_rows, valid_rows = (
        len(times),
        *(max(1, round(len(times) * share)) for share in (test, valid)),
    )
    expected = None
    if rows > test_rows + valid_rows:
        test_from = times[rows - test_rows]
        before = times.index(test_from)  # rows of one time stay together
        valid_from = times[max(0, min(rows - test_rows - valid_rows, before - 1))]
        expected = (valid_from, test_from)
    if expected is None or expected[0] == times[0]:
        with pytest.raises(BadInputError, match=r"too few|no row is left for training"):
            find_cuts(counted, valid, test)
        return
    assert find_cuts(counted, valid, test) == expected
    after = [sum(time >= cut for time in times) for cut in expected]
    assert after[1] >= round(rows * test)
    assert rows > after[0] > after[1]


@pytest.mark.parametrize(
    ("times", "split"), [([0, 1, 1, 1, 1, 1, 2], "valid"), ([0, 0, 0, 0, 0, 1], "test")]
)
def test_times_that_leave_no_row_for_training(times: list[int], split: str) -> None:
    """The error says which split would begin at the first time, not that many rows have it."""
    distinct, counts = np.unique(np.array(times, np.int64), return_counts=True)
    what = f"so {split} would begin at 1970-01-01 00:00:00, the first time"
    with pytest.raises(BadInputError, match=what):
        find_cuts([np.stack([distinct, np.cumsum(counts)])], 0.1, 0.4)


def test_by_days_the_manifest_has_no_rule(tmp_path: Path, raw: Path) -> None:
    run(settings(raw, tmp_path / "out", SPEC))
    assert "split" not in json.loads((tmp_path / "out" / "manifest.json").read_text())
