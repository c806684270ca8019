from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from clicklog.errors import BadInputError, BadRowError
from clicklog.raw import find_days, read_bytes
from etl.plan import make_plan, stage
from tests.logs import CRITEO, write_day, write_log


def _text(plan, split: str) -> bytes:
    blocks = [unit.block for unit in plan.units if unit.split == split]
    return b"".join(read_bytes(block.path, block.begin, block.end) for block in blocks)


def _joined(rows) -> bytes:
    return "".join("\t".join(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("block_bytes", [300, 1 << 20])
@pytest.mark.parametrize("limit", [None, 7, 100])
def test_every_row_goes_where_it_should(tmp_path: Path, block_bytes: int, limit) -> None:
    days = write_log(tmp_path, [12, 9, 15])
    plan = make_plan(find_days(str(tmp_path)), CRITEO, block_bytes=block_bytes, limit_rows=limit)
    days = [rows[:limit] for rows in days]
    half = (len(days[2]) + 1) // 2
    assert _text(plan, "train") == _joined(days[0] + days[1])
    assert _text(plan, "valid") == _joined(days[2][:half])
    assert _text(plan, "test") == _joined(days[2][half:])
    files = [unit.file for unit in plan.units]
    assert len(set(files)) == len(files)
    assert (len(files) == 4) is (block_bytes > 300)
    assert abs(plan.estimated_rows() - sum(map(len, days))) <= 3


def test_one_day_that_is_not_day_0(tmp_path: Path) -> None:
    rows = write_log(tmp_path / "all", [1, 20])[1]
    write_day(tmp_path / "one" / "day_7", rows)
    plan = make_plan(find_days(str(tmp_path / "one")), CRITEO, block_bytes=1 << 20)
    assert _text(plan, "train") == _joined(rows[:16])
    assert _text(plan, "valid") == _joined(rows[16:18])
    assert _text(plan, "test") == _joined(rows[18:])


def test_too_few_rows(tmp_path: Path) -> None:
    write_log(tmp_path, [5, 1])
    with pytest.raises(BadInputError, match="day_1: too few rows: nothing left for test"):
        make_plan(find_days(str(tmp_path)), CRITEO, block_bytes=1000)


def test_no_label(tmp_path: Path) -> None:
    rows = write_log(tmp_path, [5, 5])[0]
    write_day(tmp_path / "day_0", [row[1:] for row in rows])
    with pytest.raises(BadRowError, match="day_0: rows of 39 fields, so there is no label"):
        make_plan(find_days(str(tmp_path)), CRITEO, block_bytes=1000)


def test_compressed_days_are_staged(tmp_path: Path) -> None:
    write_log(tmp_path / "raw", [10, 10, 10, 10])
    texts = [(tmp_path / "raw" / f"day_{i}").read_bytes() for i in range(4)]
    for day, (ending, compress) in enumerate(
        [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
    ):
        (tmp_path / "raw" / f"day_{day}").unlink()
        (tmp_path / "raw" / f"day_{day}.{ending}").write_bytes(compress(texts[day]))
    reported = []
    staged = stage(find_days(str(tmp_path / "raw")), tmp_path / "work", reported.append)
    assert [Path(day.path).read_bytes() for day in staged] == texts
    assert [day.size for day in staged] == list(map(len, texts))
    assert sum(reported) == sum(map(len, texts[:3]))
    assert staged[3].path == str(tmp_path / "raw" / "day_3")


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz"])
def test_damaged_compressed_days(tmp_path: Path, ending: str) -> None:
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[ending]
    whole = compress(b"some text" * 100)
    for name, data in (("day_0", whole[: len(whole) // 2]), ("day_1", b"not compressed")):
        path = tmp_path / name / f"{name}.{ending}"
        path.parent.mkdir()
        path.write_bytes(data)
        with pytest.raises(BadInputError, match=f"{name}.{ending}: truncated, or not what"):
            stage(find_days(str(path.parent)), tmp_path / "work")
        assert not list((tmp_path / "work").iterdir())
