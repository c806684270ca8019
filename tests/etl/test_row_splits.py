"""Splits by share, column, time, files and values, against the rules in plain Python."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from distributed import Client
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError, SettingsError
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.units.counting import count, merge
from nvt_torchrec.etl.units.split_pass import find_cuts, prepare_division
from nvt_torchrec.etl.units.unit_plan import make_plan
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec, InputFormat
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.splits import SPLITS
from tests.clicklog.reference_reader import key_of
from tests.etl.extended import content, differences
from tests.etl.findings import bad
from tests.etl.runs import QUARANTINE, encode, failing, fit, read_split, settings
from tests.etl.split_logs import (
    SHARES_OF_TIME,
    SPLITS_OF_ROWS,
    USERS,
    numbers,
    numbers_of,
    spec_with,
    write,
)

SPLITS_BY = {**SPLITS_OF_ROWS, "shares of time": SHARES_OF_TIME}
#: The fields of rows by their numbers.
Rows = dict[int, dict[str, str]]


def _mix(value: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = (value ^ (value >> 33)) * factor % 2**64
    return value ^ (value >> 33)


def _hash(value: int, *seed: int) -> int:
    first, second = np.random.SeedSequence(seed).generate_state(2, np.uint64).tolist()
    return _mix((_mix(value % 2**64 ^ first) + second) % 2**64)


def _expected(rows: Rows, split: Split) -> dict[str, list[int]]:
    """The numbers of the rows of each split."""
    if split.by == "time":
        times = [int(fields["when"]) for fields in rows.values()]
        valid_from, test_from = 600, 720
        if not split.valid_from:
            ordered = sorted(times)
            test = len(rows) - round(len(rows) * split.test)
            valid_from, test_from = ordered[test - round(len(rows) * split.valid)], ordered[test]
        sides = [(time >= valid_from) + (time >= test_from) for time in times]
    elif split.by == "share":
        sides = [_side(_hash(n % 1000, split.seed, n // 1000), split) for n in rows]
    elif split.by == "values":
        texts = (split.train_values, split.valid_values, split.test_values)
        users = [fields["user"] for fields in rows.values()]
        sides = [[user in own for own in texts].index(True) for user in users]
        if split.valid:
            drawn = [
                _hash(n % 1000, split.seed, n // 1000) / 2**64 >= 1 - split.valid for n in rows
            ]
            sides = [side or int(valid) for side, valid in zip(sides, drawn, strict=True)]
    else:
        users = [fields["user"] for fields in rows.values()]
        sides = [_side(_hash(key_of(user), split.seed), split) for user in users]
    return {
        name: [number for number, side in zip(rows, sides, strict=True) if side == i]
        for i, name in enumerate(SPLITS)
    }


def _side(hashed: int, split: Split) -> int:
    share = hashed / 2**64
    return (share >= 1 - split.valid - split.test) + (share >= 1 - split.test)


@pytest.mark.parametrize("name", SPLITS_BY)
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
    from nvt_torchrec.etl.units.writing import read_results
    from nvt_torchrec.workflows.writer import write_workflow

    directory = tmp_path_factory.mktemp("split")
    form = "parquet" if parquet else "csv"
    rows = write(directory / "raw", dict(enumerate(files)), format=form)
    spec = spec_with(SPLITS_BY[name], form)
    days = find_days(str(directory / "raw"), split=spec.split)
    plan = make_plan(days, spec, block_bytes=block_bytes)
    plan = prepare_division(plan, spec, directory, threads=threads, max_bad_rows=0)
    fitted = fit(plan.train_blocks, spec, directory / "fit", workers=threads, max_bad_rows=0)
    write_workflow(directory / "workflow", spec, fitted)
    results = encode(plan, directory / "workflow", directory, workers=threads)
    expected = _expected(rows, spec.split)
    by_unit = {result.unit: result for result in results}
    for split in SPLITS:
        own = [by_unit[unit] for unit in plan.units if unit.split == split]
        assert sum(result.rows for result in own) == len(expected[split])
        files_there = [directory / "parts" / r.unit.file for r in own if r.has_part]
        values = [v for f in files_there for v in pq.read_table(f)["row"].to_pylist()]
        assert numbers(values) == expected[split]
        assert all((directory / "parts" / r.unit.file).exists() == bool(r.rows) for r in own)
    counted = Counter(rows[number]["item"] for number in expected["train"])
    found = fitted.vocabularies["item"]
    assert dict(zip(found.values.to_pylist(), found.counts.tolist(), strict=True)) == counted
    assert [r.to_dict() for r in read_results(directory, plan.units)] == [
        by_unit[unit].to_dict() for unit in plan.units
    ]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    directory = tmp_path_factory.mktemp("log") / "raw"
    return directory, write(directory, {0: 700, 1: 1, 2: 400}, users=40)


@pytest.fixture(scope="module")
def raw(log) -> Path:
    return log[0]


@pytest.fixture(scope="module")
def rows(log) -> Rows:
    return log[1]


@pytest.mark.parametrize("name", SPLITS_BY)
def test_both_engines_write_the_same_whole_output(
    raw: Path, rows: Rows, tmp_path: Path, dask_client: Client, name: str
) -> None:
    split = SPLITS_BY[name]
    manifest = run(settings(raw, tmp_path / "cpu", spec_with(split), workers=2))
    address = dask_client.scheduler.address
    run(settings(raw, tmp_path / "dask", spec_with(split), scheduler=address))
    expected = _expected(rows, split)
    assert numbers_of(tmp_path / "cpu") == expected
    cpu, dask = content(tmp_path / "cpu"), content(tmp_path / "dask")
    assert differences(cpu, dask) == ["manifest.json"]
    assert {k: own["rows"] for k, own in manifest["splits"].items()} == {
        k: len(own) for k, own in expected.items()
    }
    assert manifest["split"]["by"] == split.by
    assert [file["rows"]["in"] for file in manifest["inputs"]] == [700, 1, 400]
    assert bad(tmp_path / "cpu") == []
    if split.by == "time":  # no later row is in an earlier split
        times = [[int(rows[n]["when"]) for n in expected[side]] for side in SPLITS]
        assert max(times[0]) < min(times[1]) <= max(times[1]) < min(times[2])
        cuts = [manifest["split"][key] for key in ("valid_from", "test_from")]
        assert cuts == [f"1970-01-01 00:{min(t) // 60:02}:{min(t) % 60:02}" for t in times[1:]] or (
            name == "time"
        )
    if split.by == "column":  # a user is on one side
        users = [{rows[n]["user"] for n in expected[side]} for side in SPLITS]
        assert sum(map(len, users)) == len(set.union(*users)) == 40


def test_files(raw: Path, rows: Rows, tmp_path: Path) -> None:
    """The files decide, and the hash of a row's place takes validation out of training."""
    split = Split(
        "files", train_files=("day_0.csv", "day_1*"), test_files=("day_2.csv",), valid=0.3
    )
    manifest = run(settings(raw, tmp_path / "out", spec_with(split)))
    of_training = [number for number in rows if number < 2000]
    valid = {n for n in of_training if _hash(n % 1000, 0, n // 1000) / 2**64 >= 0.7}
    assert numbers_of(tmp_path / "out") == {
        "train": [number for number in of_training if number not in valid],
        "valid": [number for number in of_training if number in valid],
        "test": [number for number in rows if number >= 2000],
    }
    assert manifest["split"]["train_files"] == ["day_0.csv", "day_1*"]
    three = Split(
        "files", train_files=("day_0.csv",), valid_files=("day_1.csv",), test_files=("day_2*",)
    )
    run(settings(raw, tmp_path / "three", spec_with(three)))
    assert [len(own) for own in numbers_of(tmp_path / "three").values()] == [700, 1, 400]


def test_files_that_cannot_be_used(raw: Path, tmp_path: Path) -> None:
    def found(**files: tuple[str, ...]) -> None:
        files = {"train_files": ("day_0.csv",), "valid_files": ("day_1.csv",), **files}
        run(settings(raw, tmp_path / "out", spec_with(Split("files", **files))))

    with pytest.raises(BadInputError, match=r"test = 'x\*' matches no file; there are day_0.csv"):
        found(test_files=("x*",))
    with pytest.raises(BadInputError, match=r"day_0\.csv: belongs to train and to test"):
        found(test_files=("day_0*",))
    with pytest.raises(SettingsError, match="name files below the input directory"):
        found(test_files=("a/../../b",))
    spec = spec_with(Split("files", train_files=("a",), valid=0.1, test_files=("b",)))
    with pytest.raises(SettingsError, match="--days with a split by files"):
        run(settings(raw, tmp_path / "out", spec, days=frozenset({0})))


def test_bad_rows_are_rejected_once(raw: Path, rows: Rows, tmp_path: Path) -> None:
    """Also those in a block of which training has no row; lines are those of the file."""
    (tmp_path / "raw").mkdir()
    for path in raw.iterdir():
        (tmp_path / "raw" / path.name).write_bytes(path.read_bytes())
    with open(tmp_path / "raw" / "day_1.csv", "a") as file:
        file.write("1,1,i,r,1,u\n1,1,i,r,1,user é9,12:00,\n1,1,i,r,1,,5,\n")
    by_values = SPLITS_OF_ROWS["values"]
    for split in (SHARES_OF_TIME, SPLITS_OF_ROWS["column"], by_values):
        output = tmp_path / split.by
        manifest = run(settings(tmp_path / "raw", output, spec_with(split), **QUARANTINE))
        rejected = 2  # a time is read by time only, and a user by column only
        assert manifest["rows"] == {"in": 1101 + 3, "out": 1101 + 3 - rejected, "rejected": 2}
        lines = (output / "rejected" / "day_1.csv.tsv").read_text().splitlines()[1:]
        assert [int(line.split("\t")[1]) for line in lines] == (
            [3, 4] if split.by == "time" else [3, 5]
        )
        assert bad(output) == []
    with pytest.raises(BadRowError, match=r"day_1\.csv, line 3"):
        run(settings(tmp_path / "raw", tmp_path / "stops", spec_with(SHARES_OF_TIME)))


def test_resumed(raw: Path, rows: Rows, tmp_path: Path, monkeypatch) -> None:
    """The times are not counted again, and the output is the same."""
    spec = spec_with(SHARES_OF_TIME)
    run(settings(raw, tmp_path / "whole", spec))
    with failing("nvt_torchrec.etl.stages.Stages.count_and_encode", KeyboardInterrupt("ctrl-c")):
        run(settings(raw, tmp_path / "out", spec))
    monkeypatch.setattr("nvt_torchrec.etl.units.split_pass.read_block_chunks", None)
    run(settings(raw, tmp_path / "out", spec, workers=1))
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert sorted(numbers_of(tmp_path / "out")["train"]) == _expected(rows, spec.split)["train"]


def test_empty_splits_are_refused(raw: Path, tmp_path: Path) -> None:
    late = dataclasses.replace(
        SPLITS_OF_ROWS["time"], valid_from="1970-01-01 00:05", test_from="1971-01-01"
    )
    with pytest.raises(BadInputError, match=r"no row for test; train has \d+.*\n.*time_format"):
        run(settings(raw, tmp_path / "late", spec_with(late)))
    early = dataclasses.replace(late, valid_from="1969-01-01", test_from="1970-01-01 00:05")
    with pytest.raises(BadInputError, match="no well-formed row is for training"):
        run(settings(raw, tmp_path / "early", spec_with(early)))


@given(
    blocks=st.lists(st.lists(st.integers(-3, 9), max_size=12), min_size=1, max_size=4),
    valid=st.sampled_from([0.1, 0.3]),
    test=st.sampled_from([0.1, 0.4]),
)
def test_cuts_by_time(blocks: list[list[int]], valid: float, test: float) -> None:
    """As plain Python finds them in a sorted list."""
    times = sorted(time for block in blocks for time in block)
    counted = merge(count([np.array(block, np.int64)]) for block in blocks)
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


def test_a_value_that_the_split_does_not_name(raw: Path, tmp_path: Path) -> None:
    """The error names file, line, column and text; in parquet, and with quarantine, likewise."""
    named = SPLITS_OF_ROWS["values"]
    split = dataclasses.replace(named, train_values=named.train_values[1:])
    frame = pd.read_csv(raw / "day_0.csv")
    unknown = frame.index[frame["user"] == "user é8"]
    what = rf"day_0\.csv, line {unknown[0] + 2}.*column user: 'user é8': the \[split\] of the spec"
    with pytest.raises(BadRowError, match=what) as error:
        run(settings(raw, tmp_path / "stops", spec_with(split)))
    assert "add it to train, valid or test of [split]" in error.value.remedy
    manifest = run(settings(raw, tmp_path / "out", spec_with(split), **QUARANTINE))
    assert manifest["inputs"][0]["rows"]["rejected"] == len(unknown)
    (tmp_path / "raw").mkdir()
    frame.to_parquet(tmp_path / "raw" / "day_0.parquet")
    with pytest.raises(BadRowError, match=r"day_0\.parquet.*'user é8': the \[split\] of the spec"):
        run(settings(tmp_path / "raw", tmp_path / "parquet", spec_with(split, "parquet")))


def test_integers_are_values(tmp_path: Path) -> None:
    """Folds of a table are named by their digits, in text and in parquet."""
    frame = pd.DataFrame({"label": [0, 1] * 30, "item": ["a"] * 60, "fold": [0, 1, 2] * 20})
    spec = FeatureSpec(
        "label", (), (CategoricalColumn("item", raw="string"),),
        input=InputFormat("parquet"),
        split=Split(
            "values", column="fold", train_values=("2",), valid_values=("1",), test_values=("0",)
        ),
    )  # fmt: skip
    frame.to_parquet(tmp_path / "log.parquet")
    manifest = run(settings(tmp_path / "log.parquet", tmp_path / "out", spec))
    assert [manifest["splits"][split]["rows"] for split in SPLITS] == [20, 20, 20]
    assert "fold" not in read_split(tmp_path / "out", "train")


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"column": ""}, "name a column, such as column"),
        ({"test_values": ()}, 'train = "train", test = "test"'),
        ({"valid_values": ()}, "or a share of the training rows"),
        ({"valid": 0.1}, "or a share of the training rows"),
        ({"valid_values": USERS[8:9]}, "each text to one split"),
        ({"test_values": (" user",)}, "without spaces around them"),
        ({"test_values": ("",)}, "without spaces around them"),
        ({"train_files": ("a",)}, "takes column, train, valid, test, seed"),
    ],
)
def test_values_that_no_split_has(wrong: dict, what: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(what)):
        dataclasses.replace(SPLITS_OF_ROWS["values"], **wrong)
