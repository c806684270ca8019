"""The benchmark's log: many rare values in the largest columns, all else as it was synthesized."""

from pathlib import Path

from benchmarks.etl.log import DAYS, SUMMARY_FILE, make_log, repeat_head, rows_of
from nvt_torchrec.base.files.atomic import read_json

LARGEST = {14, 23, 24, 33, 34, 35}  # fields of cat_0, 9, 10, 19, 20, 21


def rows(path: Path) -> list[list[list[str]]]:
    days = sorted(path.glob("day_*"))
    return [[line.split("\t") for line in day.read_text().splitlines()] for day in days]


def test_rare_values_replace_others_in_the_largest_columns(tmp_path: Path):
    make_log(tmp_path / "plain", 4000, 0.05, 0.0)
    make_log(tmp_path / "rare", 4000, 0.05, 0.25)
    plain, rare = rows(tmp_path / "plain"), rows(tmp_path / "rare")
    assert len(rare) == DAYS
    assert rows_of(tmp_path / "rare") == sum(map(len, rare)) == 4000
    changed = [
        field
        for days in zip(plain, rare, strict=True)
        for row, other in zip(*days, strict=True)
        for field, (a, b) in enumerate(zip(row, other, strict=True))
        if a != b
    ]
    assert set(changed) == LARGEST
    assert abs(len(changed) / (4000 * len(LARGEST)) - 0.25) < 0.02

    def values(log):
        return len({row[14] for day in log for row in day})

    assert values(rare) > 2 * values(plain)


def test_the_log_is_made_once(tmp_path: Path):
    make_log(tmp_path / "log", 800, 0.05, 0.25)
    before = (tmp_path / "log" / "day_0").stat().st_mtime_ns
    make_log(tmp_path / "log", 800, 0.05, 0.25)
    assert (tmp_path / "log" / "day_0").stat().st_mtime_ns == before
    (tmp_path / "log" / SUMMARY_FILE).unlink()  # interrupted: it is made again
    make_log(tmp_path / "log", 800, 0.05, 0.25)
    assert (tmp_path / "log" / "day_0").stat().st_mtime_ns != before
    assert read_json(tmp_path / "log" / SUMMARY_FILE, "the log")["rows"] == 800


def test_a_longer_log_of_the_same_values(tmp_path: Path):
    make_log(tmp_path / "log", 800, 0.05, 0.25)
    repeat_head(tmp_path / "log", tmp_path / "1x", 5000, 1)
    repeat_head(tmp_path / "log", tmp_path / "3x", 5000, 3)
    for day, text in enumerate(sorted((tmp_path / "1x").glob("day_*"))):
        head = text.read_bytes()
        assert 4500 < len(head) <= 5000
        assert (tmp_path / "log" / f"day_{day}").read_bytes().startswith(head)
        assert head.endswith(b"\n")
        assert (tmp_path / "3x" / f"day_{day}").read_bytes() == 3 * head
