"""Runs over a log with a line that is longer than it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadRowError
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.check import check
from nvt_torchrec.etl.run import run
from tests.etl.runs import assert_is, settings, tree
from tests.logs import write_log

ROWS = [60, 50, 41]
ZEROS = 64 << 20


def test_zeros_at_the_end_of_a_day(tmp_path: Path) -> None:
    """What a crash leaves: one bad row, named, and kept by its first bytes; not hours, not GiBs."""
    days = write_log(tmp_path / "raw", ROWS)
    day = tmp_path / "raw" / "day_1"
    size = day.stat().st_size
    with open(day, "ab") as file:
        file.truncate(size + ZEROS)
    what = f"a line of 67,108,864 bytes from byte {size:,} on"
    with pytest.raises(BadRowError, match=rf"day_1, line 51: {what}"):
        run(settings(tmp_path / "raw", tmp_path / "out", block_mb=1))
    allow = {"on_bad_rows": "quarantine", "max_bad_fraction": 0.1, "block_mb": 1}
    manifest = run(settings(tmp_path / "raw", tmp_path / "out", **allow))
    assert manifest["rows"] == {"in": 152, "out": 151, "rejected": 1}
    assert_is(tmp_path / "out", days)
    (rejected,) = (tmp_path / "out" / "rejected").iterdir()
    _, row = rejected.read_bytes().splitlines()
    path, line, reason, raw = row.split(b"\t")
    assert (path, line, raw) == (str(day).encode(), b"51", bytes(1024))
    assert reason.startswith(what.encode())
    assert [one for one in check(tmp_path / "out") if one.severity == "error"] == []


def test_the_flag(tmp_path: Path, capsys) -> None:
    """A log of long lines can be read, and the workflow remembers what its lines may have."""
    rows = write_log(tmp_path / "raw", ROWS)
    for day in range(3):
        text = (tmp_path / "raw" / f"day_{day}").read_text()
        lines = text.splitlines()
        lines[7] += " " * 5000  # no hexadecimal digits
        (tmp_path / "raw" / f"day_{day}").write_text("\n".join(lines) + "\n")
    flags = ["--input_path", str(tmp_path / "raw"), "--engine", "cpu", "--on_bad_rows"]
    flags += ["quarantine", "--max_bad_fraction", "0.1", "--output_path"]
    reasons = []
    for name, kb in (("short", "4"), ("long", "6")):
        assert main(["run", *flags, str(tmp_path / name), "--max_line_kb", kb]) == 0
        text = (tmp_path / name / "rejected" / "day_0.tsv").read_bytes()
        reasons.append(text.splitlines()[1].split(b"\t")[2])
    assert b"where at most 4,096 are read" in reasons[0]
    assert b"hexadecimal" in reasons[1]
    left = [[row for i, row in enumerate(day) if i != 7] for day in rows]
    assert_is(tmp_path / "short", left)
    ids = [one for one in tree(tmp_path / "short") if "part." in one]
    assert {one: tree(tmp_path / "short")[one] for one in ids} == {
        one: tree(tmp_path / "long")[one] for one in ids
    }
    assert main(["run", *flags, str(tmp_path / "no"), "--max_line_kb", "0"]) == 2
    assert "max_line_kb = 0" in capsys.readouterr().err
