from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.formats.day_names import parse_day_name, parse_days, to_date
from nvt_torchrec.formats.feature_spec.split import Split

SHARE = Split("share", valid=0.1, test=0.1)
OCTOBER_28 = (datetime.date(2024, 10, 28) - datetime.date(1970, 1, 1)).days


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("raw/day_7.tsv.gz", ("day", 7)),
        ("part-00017.csv", ("number", 17)),
        ("part.3.parquet", ("number", 3)),
        ("x_12.tsv.gz", ("number", 12)),
        ("part-00004-5b2d7f9c-0123-4567-89ab-0123456789ab-c000.snappy.parquet", ("number", 4)),
        ("2024-10-28.csv", ("date", OCTOBER_28)),
        ("clicks-20241028.parquet", ("date", OCTOBER_28)),
        ("v2_2024_10_28.tsv.zst", ("date", OCTOBER_28)),
        ("log/date=2024-10-28/part-0.parquet", ("date", OCTOBER_28)),
        ("run=3/day_7", ("day", 7)),
        ("part-20241399.csv", ("number", 20241399)),  # no such date
        ("x_99999999999.csv", None),
        ("train_v2.csv", None),
        ("adult.data", None),
        ("lr=0.1/train.csv", None),
        ("README-2.md", None),
    ],
)
def test_names(path: str, expected) -> None:
    name = parse_day_name(path)
    assert (name and (name.kind, name.number)) == expected


@given(st.integers(0, 80_000))
def test_a_date_is_the_days_since_1970(day: int) -> None:
    date = to_date(day)
    for text in (f"{date}.csv", f"clicks-{date:%Y%m%d}.parquet", f"date={date}/x.parquet"):
        name = parse_day_name(text)
        assert name is not None
        assert (name.number, name.format_name(day)) == (day, str(date))
    assert parse_days(str(date)) == {day}


def _write(directory: Path, *names: str) -> str:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("x")
    return str(directory)


def _found(path: str, *args, **options) -> list[tuple[int, str]]:
    return [(file.day, file.name) for file in find_days(path, *args, **options)]


def test_numbered_files_in_natural_order(tmp_path: Path) -> None:
    raw = _write(tmp_path, *(f"part-{i}.csv" for i in (10, 9, 11)), "README.md", "_SUCCESS")
    assert _found(raw) == [(9, "part-9.csv"), (10, "part-10.csv"), (11, "part-11.csv")]
    assert _found(f"{raw}/part-1*.csv") == [(10, "part-10.csv"), (11, "part-11.csv")]
    assert _found(f"{raw}/part-9.csv") == [(9, "part-9.csv")]


def test_dated_files_and_partitions(tmp_path: Path) -> None:
    raw = _write(tmp_path / "a", "2024-10-28.csv", "2024-10-30.csv", "2024-10-29.csv.gz")
    assert [name for _, name in _found(raw)] == ["2024-10-28", "2024-10-29", "2024-10-30"]
    last = parse_days("2024-10-29..2024-10-30")
    assert [name for _, name in _found(raw, last)] == ["2024-10-29", "2024-10-30"]
    for after in (OCTOBER_28 - 1, OCTOBER_28, OCTOBER_28 + 1):  # the day itself may be missing
        names = [name for _, name in _found(raw, after=after)]
        assert names == ["2024-10-28", "2024-10-29", "2024-10-30"][max(0, after - OCTOBER_28) :]
    hive = _write(tmp_path / "b", "date=2024-10-28/part-0.csv", "date=2024-10-29/part-0.csv")
    assert [name for _, name in _found(hive)] == ["2024-10-28", "2024-10-29"]
    assert _found(f"{hive}/date=2024-10-29/part-0.csv")[0][1] == "2024-10-29"
    _write(tmp_path / "b", "date=2024-10-29/part-1.csv")
    with pytest.raises(BadInputError, match="expected one file for a day, found 2"):
        find_days(hive)
    for path in (f"{hive}/*/*.csv", hive):
        assert [day for day, _ in _found(path, split=SHARE)] == [0, 1, 2]


def test_files_of_spark_and_hive(tmp_path: Path) -> None:
    """Parts with gaps in their numbers, several jobs and directories, beside what is no data."""
    jobs = [f"{digit * 8}-7a7b-4a5e-8f6d-1d9f1c2b3a4d-c000.snappy.parquet" for digit in "ab"]
    names = [f"d=1/h={h}/part-0000{n}-{job}" for h in (9, 10) for n in (0, 2) for job in jobs]
    others = ["_SUCCESS", "d=1/_SUCCESS", f"d=1/h=9/.part-00000-{jobs[0]}.crc", "_log/part-0.csv"]
    raw = _write(tmp_path, *names, *others)
    assert [file.path.removeprefix(f"{raw}/") for file in find_days(raw, split=SHARE)] == names
    days = _write(tmp_path / "days", "day_0", "day_1", "synthetic.json", "more/part-0.csv")
    assert [day for day, _ in _found(days, split=SHARE)] == [0, 1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["2024-10-28.csv", "2024-10-30.csv"], r"missing 2024-10-29\n.*2024-10-28,2024-10-30"),
        (["part-008.csv", "part-011.csv"], r"missing part-009, part-010\n.*--days 8,11"),
        (["x_3.csv", "x_2000000000.csv"], "missing x_4, x_5, .* …"),
        (["part-0.csv", "part-1.csv", "other-1.csv"], "several kinds: other-1.csv, part-0.csv"),
        (["part-0.csv", "2024-10-28.csv"], "several kinds"),
        (["part-1.csv", "part-01.csv"], "two files for"),
        (["day_0", "day_2", "day_5"], r"missing day_1, day_3, day_4\n.*--days 0,2,5"),
        (["day_0", "day_0.tsv"], "two files for day 0"),
    ],
)
def test_names_that_cannot_be_used(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        find_days(_write(tmp_path, *names))


def test_other_files_beside_days_are_ignored(tmp_path: Path) -> None:
    assert _found(_write(tmp_path, "day_0", "day_1.tsv", "notes-3.txt")) == [
        (0, "day 0"), (1, "day 1")
    ]  # fmt: skip


def test_globs(tmp_path: Path) -> None:
    raw = _write(tmp_path, "b.csv", "a10.csv", "a9.csv")
    with pytest.raises(BadInputError, match=r"no number or date in .*a9\.csv"):
        find_days(f"{raw}/*.csv")
    assert _found(f"{raw}/*.csv", split=SHARE) == [(0, "a9.csv"), (1, "a10.csv"), (2, "b.csv")]
    with pytest.raises(BadInputError, match="no file matches"):
        find_days(f"{raw}/*.tsv")
    with pytest.raises(BadInputError, match="can only be an entire path component"):
        find_days(f"{raw}/a**")


def test_lists_of_days() -> None:
    assert parse_days("3..5,9, 20241028") == {3, 4, 5, 9, OCTOBER_28}
    assert parse_days("2024-10-28..2024-10-30") == {OCTOBER_28 + i for i in range(3)}
    for text, message in [
        ("2024-10-30..2024-10-28", "ends before it begins"),
        ("2024-10-xx", "cannot read"),
        ("5..", "cannot read"),
        ("0-99999999999", "days"),
    ]:
        with pytest.raises(SettingsError, match=message):
            parse_days(text)
