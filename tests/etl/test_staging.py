"""Compressed days: refused by their first rows, and cleaned up."""

from __future__ import annotations

import gzip
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.state import staging
from tests.etl.runs import assert_is, failing, settings
from tests.logs import COMPRESS, ROWS, pack, random_rows, text_of, write_day, write_log

MIB = 1 << 20
ZEROS = bytes(32 * MIB)


@pytest.fixture
def unpacked(monkeypatch) -> list[int]:
    """The sizes of the chunks that were decompressed in order to be written."""
    sizes: list[int] = []

    def counted(path: str, chunk_bytes: int, read=staging.read_stream) -> Iterator[bytes]:
        for chunk in read(path, chunk_bytes):
            sizes.append(len(chunk))
            yield chunk

    monkeypatch.setattr(staging, "read_stream", counted)
    return sizes


def _random_text(rows: int) -> bytes:
    """Rows that compress to about half: one MiB of them is what a file is judged by."""
    hashes = [[os.urandom(4).hex() for _ in range(26)] for _ in range(rows)]
    return text_of([["0", *["1"] * 13, *row] for row in hashes]).encode()


@pytest.mark.parametrize("ending", list(COMPRESS))
def test_zeros_are_refused_before_they_are_written(tmp_path: Path, ending: str, unpacked) -> None:
    path = tmp_path / f"day_0.{ending}"
    path.write_bytes(COMPRESS[ending](ZEROS))
    with pytest.raises(
        BadRowError, match=rf"day_0.{ending}: the line at byte .* does not end within"
    ):
        run(settings(path, tmp_path / "out"))
    assert unpacked == []
    assert not list((tmp_path / "out").iterdir())


def test_other_days_stop_when_one_fails(tmp_path: Path, unpacked, monkeypatch) -> None:
    """Otherwise hours of decompressing would go on behind the error."""
    failed, read = threading.Event(), staging.read_stream

    def wait_for_the_other(path: str, chunk_bytes: int) -> Iterator[bytes]:
        try:
            for number, chunk in enumerate(read(path, chunk_bytes)):
                assert number < 4 or "day_1" in path or failed.wait(600)
                yield chunk
        finally:
            failed.set()

    monkeypatch.setattr(staging, "read_stream", wait_for_the_other)
    rows = text_of(random_rows(50, 0)).encode()
    (tmp_path / "raw").mkdir()
    whole = gzip.compress(rows * (160 * MIB // len(rows)), 1)
    (tmp_path / "raw" / "day_0.gz").write_bytes(whole)
    (tmp_path / "raw" / "day_1.gz").write_bytes(gzip.compress(_random_text(16_000), 1)[:-100])
    with pytest.raises(BadInputError, match=r"day_1.gz"):
        run(settings(tmp_path / "raw", tmp_path / "out", workers=2))
    assert sum(unpacked) < 100 * MIB
    assert not list((tmp_path / "out").iterdir())


def test_a_bad_row_later_on(tmp_path: Path, caplog) -> None:
    """The copies go with everything else if nothing was done; else they stay, and that is said."""
    caplog.set_level(logging.INFO, "nvt_torchrec.etl")
    raw, output = tmp_path / "raw", tmp_path / "out"
    days = write_log(raw, [400, 41])
    for bad_day, kept in ((0, False), (1, True)):
        for day, rows in enumerate(days):
            write_day(raw / f"day_{day}", [*rows, ["bad"]] if day == bad_day else rows)
        pack(raw / "day_0")
        with pytest.raises(BadRowError, match=f"day_{bad_day}"):
            run(settings(raw, output, workers=1))
        assert bool(list(output.rglob("decompressed/day_0"))) is kept
        assert ("GB of decompressed days for the next try" in caplog.text) is kept
    assert not list(output.glob("*/*/*/.day*"))


def test_an_interrupted_run_keeps_its_copies(log, tmp_path: Path, monkeypatch) -> None:
    """Ctrl-C is no reason to decompress again; the input is not wrong."""
    raw, output = tmp_path / "raw", tmp_path / "out"
    write_log(raw, ROWS)
    pack(raw / "day_0")
    with failing("nvt_torchrec.etl.stages.make_plan", KeyboardInterrupt("ctrl-c")):
        run(settings(raw, output))
    (copy,) = output.glob(".work/*/decompressed/day_0")
    before = copy.stat().st_ino
    monkeypatch.setattr("nvt_torchrec.etl.run.output.release", lambda path: None)
    run(settings(raw, output))
    assert copy.stat().st_ino == before
    assert_is(output, log[1])
