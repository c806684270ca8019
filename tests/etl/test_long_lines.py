"""Runs over a log with a line that is longer than it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadRowError
from nvt_torchrec.etl.run import run
from tests.etl.findings import bad
from tests.etl.runs import QUARANTINE, assert_is, etl_run, settings
from tests.logs import ROWS, write_log

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
    manifest = run(settings(tmp_path / "raw", tmp_path / "out", block_mb=1, **QUARANTINE))
    assert manifest["rows"] == {"in": 152, "out": 151, "rejected": 1}
    assert_is(tmp_path / "out", days)
    (rejected,) = (tmp_path / "out" / "rejected").iterdir()
    _, row = rejected.read_bytes().splitlines()
    path, line, reason, raw = row.split(b"\t")
    assert (path, line, raw) == (str(day).encode(), b"51", bytes(1024))
    assert reason.startswith(what.encode())
    assert bad(tmp_path / "out") == []


def test_the_flag(tmp_path: Path, capsys) -> None:
    """A log of long lines can be read, and the workflow remembers what its lines may have."""
    rows = write_log(tmp_path / "raw", ROWS)
    for day in range(3):
        text = (tmp_path / "raw" / f"day_{day}").read_text()
        lines = text.splitlines()
        lines[7] += " " * 5000  # no hexadecimal digits
        (tmp_path / "raw" / f"day_{day}").write_text("\n".join(lines) + "\n")
    flags = ["--engine=cpu", "--on_bad_rows=quarantine", "--max_bad_fraction=0.1"]
    reasons = []
    for name, kb in (("short", "4"), ("long", "6")):
        assert etl_run(tmp_path / "raw", tmp_path / name, *flags, "--max_line_kb", kb) == 0
        text = (tmp_path / name / "rejected" / "day_0.tsv").read_bytes()
        reasons.append(text.splitlines()[1].split(b"\t")[2])
    assert b"where at most 4,096 are read" in reasons[0]
    assert b"hexadecimal" in reasons[1]
    left = [[row for i, row in enumerate(day) if i != 7] for day in rows]
    assert_is(tmp_path / "short", left)
    assert_is(tmp_path / "long", left)
    assert etl_run(tmp_path / "raw", tmp_path / "no", "--max_line_kb", "0") == 2
    assert "max_line_kb = 0" in capsys.readouterr().err
