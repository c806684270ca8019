from __future__ import annotations

import copy
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadRowError, OutputError
from nvt_torchrec.clicklog.text import delimited, tokenizer
from nvt_torchrec.clicklog.text.remedies import NUMBER_LABEL
from nvt_torchrec.etl.run import run
from tests.etl.extended import content
from tests.etl.runs import QUARANTINE, assert_is, cut, read_split, settings
from tests.logs import CRITEO, Reference, pack, write_day


@pytest.fixture(scope="module", params=["cpu", "dask"])
def options(request: pytest.FixtureRequest, engine_options) -> dict:
    return engine_options(request.param)


@pytest.fixture(scope="module")
def days(log) -> list:
    return log[1]


@pytest.fixture
def described(monkeypatch) -> list[int]:
    """An item for each row whose number of fields is described."""
    seen, describe = [], delimited.describe_count
    monkeypatch.setattr(delimited, "describe_count", lambda *a: seen.append(1) or describe(*a))
    return seen


def _write(directory: Path, days: list) -> Path:
    for number, rows in enumerate(days):
        write_day(directory / f"day_{number}", rows)
    return directory


def _rejected(output: Path) -> dict[str, list[list[bytes]]]:
    """file → lines of file, line, reason, raw."""
    return {
        path.name: [line.split(b"\t", 3) for line in path.read_bytes().split(b"\n")[1:-1]]
        for path in sorted((output / "rejected").iterdir())
    }


def _written(directory: Path) -> dict[str, int]:
    """When each part was written, by split and name."""
    return {
        "/".join(path.parts[-2:]): path.stat().st_mtime_ns for path in directory.rglob("part.*")
    }


@pytest.mark.parametrize("day", [0, 2], ids=["in fit", "in transform"])
def test_a_bad_row_stops_the_run(days, options, tmp_path: Path, day: int) -> None:
    bad = copy.deepcopy(days)
    bad[day][30][5] = "1.5"
    raw, output = _write(tmp_path / "raw", bad), tmp_path / "out"
    with pytest.raises(BadRowError, match=rf"day_{day}, line 31: column int_4: '1.5'"):
        run(settings(raw, output, **options))
    assert not (output / "manifest.json").exists()
    _write(raw, days)
    if not any(output.iterdir()):  # nothing was done: a fit with Dask is one unit
        run(settings(raw, output, **options))
    else:  # corrected, the input is another
        with pytest.raises(OutputError, match=rf"day_{day} size: \d+ before, \d+ now"):
            run(settings(raw, output, **options))
        run(settings(raw, output, **options, restart=True))
    assert_is(output, days)
    assert not (output / ".unfinished").exists()


def test_bad_rows_can_be_left_out(days, options, tmp_path: Path) -> None:
    days = copy.deepcopy(days)
    days[1][10][0] = "7"
    days[2][40].append("\ufffd more")
    raw, output = _write(tmp_path / "raw", days), tmp_path / "out"
    last = raw / "day_2"
    last.write_bytes(last.read_bytes().replace("\ufffd".encode(), b"\xff"))  # no UTF-8
    manifest = run(
        settings(raw, output, **options, on_bad_rows="quarantine", max_bad_fraction=0.02)
    )
    assert manifest["rows"] == {"in": 151, "out": 149, "rejected": 2}
    assert [one["rows"]["rejected"] for one in manifest["inputs"]] == [0, 1, 1]
    assert [one["rows"]["out"] for one in manifest["inputs"]] == [60, 49, 40]
    raw_1 = "\t".join(days[1][10]).encode()
    raw_2 = "\t".join(days[2][40]).encode().replace("\ufffd".encode(), b"\xff")
    path_1, path_2 = str(raw / "day_1").encode(), str(raw / "day_2").encode()
    reason = (
        b"column label: '7': expected a label of 0 or 1 -> correct the file, or set threshold in "
        b"[label] of the spec: with threshold = 4, numbers of at least 4 are 1, others 0"
    )
    assert _rejected(output) == {
        "day_1.tsv": [[path_1, b"11", reason, raw_1]],
        "day_2.tsv": [[path_2, b"41", b"41 fields instead of 40", raw_2]],
    }
    rows = cut(days)
    reference = Reference([row for row in rows["train"] if row[0] != "7"])
    expected = reference.frame(rows["test"][:-1])
    pd.testing.assert_frame_equal(
        read_split(output, "test")[CRITEO.categorical_names], expected[CRITEO.categorical_names]
    )


def test_many_bad_rows(days, options, tmp_path: Path, monkeypatch) -> None:
    """All are kept, with lines counted over the blocks of a compressed file and pieces of these."""
    monkeypatch.setattr("nvt_torchrec.etl.units.counting.PIECE_BYTES", 100_000)
    days = copy.deepcopy(days)
    days[1] = (days[1] + [["x"]] * 150 + days[1]) * 60
    raw, output = _write(tmp_path / "raw", days), tmp_path / "out"
    pack(raw / "day_1")
    quarantine = settings(raw, output, **options, on_bad_rows="quarantine", block_mb=1)
    match = r"9000 of 15101 rows \(59.60%\).*max_bad_fraction 0.01; most in .*day_1.gz, 9000 of"
    with pytest.raises(BadRowError, match=rf"{match} 15000:\n  line 51: 1 field instead of 40\n"):
        run(quarantine)
    assert not (output / "manifest.json").exists()
    written = _written(output / ".work")
    assert len(written) == 5
    # allowed, nothing is done again
    options = {**options, "on_bad_rows": "quarantine", "block_mb": 1, "max_bad_fraction": 0.6}
    manifest = run(settings(raw, output, **options))
    assert manifest["rows"] == {"in": 15101, "out": 6101, "rejected": 9000}
    assert _written(output / "criteo_binary") == written
    lines = _rejected(output)["day_1.gz.tsv"]
    wrong = [1 + i for i, row in enumerate(days[1]) if row == ["x"]]
    assert [int(line[1]) for line in lines] == wrong
    assert {line[3] for line in lines} == {b"x"}
    assert_is(output, [days[0], [row for row in days[1] if row != ["x"]], days[2]])


def test_quarantine_after_an_error_keeps_what_was_done(days, tmp_path: Path) -> None:
    """What is done had no bad rows; the other way round it might have had some."""
    days = copy.deepcopy(days)
    days[2][40][3] = "zwölf"
    raw = _write(tmp_path / "raw", days)
    with pytest.raises(BadRowError, match="zwölf"):
        run(settings(raw, tmp_path / "out"))
    done = _written(tmp_path / "out" / ".work")
    assert done
    strict = settings(raw, tmp_path / "other", on_bad_rows="quarantine", max_bad_fraction=0)
    with pytest.raises(BadRowError, match="max_bad_fraction"):
        run(strict)
    with pytest.raises(OutputError, match="on_bad_rows: 'quarantine' before, 'error' now"):
        run(settings(raw, tmp_path / "other"))
    run(settings(raw, tmp_path / "whole", **QUARANTINE))
    run(settings(raw, tmp_path / "out", **QUARANTINE))
    assert _written(tmp_path / "out" / "criteo_binary").items() >= done.items()
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert _rejected(tmp_path / "out")["day_2.tsv"][0][3] == "\t".join(days[2][40]).encode()


def test_very_many_bad_rows_end_the_run_soon(days, tmp_path: Path, described, monkeypatch) -> None:
    """Not all of them are described, and the other blocks are not read to the end."""
    raw = _write(tmp_path / "raw", days)
    with open(raw / "day_0", "ab") as file:
        file.write(b"x\n" * 2_000_000)
    read, parse = [], tokenizer._parse
    monkeypatch.setattr(tokenizer, "_parse", lambda *a: read.append(len(a[0])) or parse(*a))
    with pytest.raises(BadRowError, match=r"line 61: 1 field(.|\n)*more than --max_bad_fraction"):
        run(settings(raw, tmp_path / "out", on_bad_rows="quarantine", block_mb=1))
    assert len(described) < 1000
    assert sum(read) < 20 << 20


@pytest.mark.parametrize("table", [False, True], ids=["text", "parquet"])
def test_ratings_are_not_left_out(tmp_path: Path, table: bool) -> None:
    """What is bad is the spec: with --on_bad_rows quarantine only rows rated 1 would be left."""
    ratings = pa.table({"user": ["a", "b", "c"] * 100, "rating": [1, 5, 2.5] * 100})
    kind, write = ("parquet", pq.write_table) if table else ("csv", pyarrow.csv.write_csv)
    log, spec = tmp_path / f"ratings.{kind}", tmp_path / "spec.toml"
    write(ratings, log)
    spec.write_text(
        f'''[input]
        format = "{kind}"
        [label]
        name = "rating"
        [[categorical]]
        names = "user"
        raw = "string"
        [split]
        by = "share"
        valid = 0.1
        test = 0.1
        '''
    )
    with pytest.raises(BadRowError, match=r"column rating: '?5(.0|'): expected a label") as error:
        run(settings(log, tmp_path / "out", spec=spec))
    assert str(error.value).endswith(NUMBER_LABEL), "and no word of a quarantine"
    with pytest.raises(BadRowError, match=r"200 of 300 rows \(66.67%\)") as error:
        run(settings(log, tmp_path / "out", spec=spec, on_bad_rows="quarantine"))
    assert str(error.value).endswith(NUMBER_LABEL)
