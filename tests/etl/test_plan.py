from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import fsspec
import pytest

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.clicklog.readers.lines import read_bytes
from nvt_torchrec.etl.state.staging import decompress_days
from nvt_torchrec.etl.units.unit_plan import make_plan
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.splits import SPLITS
from tests.clicklog.reference_reader import as_lists
from tests.etl.runs import settings
from tests.logs import COMPRESS, CRITEO, read_block, text_of, write_day, write_log
from tests.spec_logs import stream_rows, write_spec_log


def _text(plan, split: str) -> bytes:
    blocks = [unit.block for unit in plan.units if unit.split == split]
    return b"".join(read_bytes(block.path, block.begin, block.end) for block in blocks)


def _staged(raw: Path, work: Path, spec=CRITEO) -> list:
    work.mkdir(exist_ok=True)
    return decompress_days(find_days(str(raw)), settings(raw, work, spec, workers=2), work)


@pytest.mark.parametrize("block_bytes", [300, 1 << 20])
@pytest.mark.parametrize("limit", [None, 7, 100])
def test_every_row_goes_where_it_should(tmp_path: Path, block_bytes: int, limit) -> None:
    days = write_log(tmp_path, [12, 9, 15])
    plan = make_plan(find_days(str(tmp_path)), CRITEO, block_bytes=block_bytes, limit_rows=limit)
    days = [rows[:limit] for rows in days]
    half = (len(days[2]) + 1) // 2
    assert _text(plan, "train") == text_of(days[0] + days[1]).encode()
    assert _text(plan, "valid") == text_of(days[2][:half]).encode()
    assert _text(plan, "test") == text_of(days[2][half:]).encode()
    files = [unit.file for unit in plan.units]
    assert len(set(files)) == len(files)
    assert (len(files) == 4) is (block_bytes > 300)
    assert abs(plan.estimated_rows() - sum(map(len, days))) <= 3


def test_too_few_rows(tmp_path: Path) -> None:
    write_log(tmp_path, [5, 1])
    with pytest.raises(BadInputError, match="day_1: too few rows: none left for test"):
        make_plan(find_days(str(tmp_path)), CRITEO, block_bytes=1000)


def test_no_label(tmp_path: Path) -> None:
    rows = write_log(tmp_path, [5, 5])[0]
    write_day(tmp_path / "day_0", [row[1:] for row in rows])
    with pytest.raises(BadRowError, match="day_0: rows without label, which training reads"):
        make_plan(find_days(str(tmp_path)), CRITEO, block_bytes=1000)


@pytest.mark.parametrize("ending", list(COMPRESS))
def test_damaged_compressed_days(tmp_path: Path, ending: str) -> None:
    whole = COMPRESS[ending](b"some text" * 100)
    for name, data in (("day_0", whole[: len(whole) // 2]), ("day_1", b"not compressed")):
        path = tmp_path / name / f"{name}.{ending}"
        path.parent.mkdir()
        path.write_bytes(data)
        with pytest.raises(BadInputError, match=f"{name}.{ending}: truncated, or not of"):
            _staged(path.parent, tmp_path / "work")
        assert not list((tmp_path / "work").iterdir())


# ---- formats: CSV with a header, parquet, compressed, one file, remote

RETAIL = load_spec("retail")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same rows as csv and as parquet."""
    directory = tmp_path_factory.mktemp("logs")
    for name, spec in SPECS.items():
        write_spec_log(directory / name, spec)
    return {name: directory / name for name in SPECS}


SPECS = {"csv": RETAIL, "parquet": dataclasses.replace(RETAIL, input=InputFormat("parquet"))}


def _rows(plan, spec) -> dict[str, list]:
    """The rows of each split, in order, as lists."""
    read: dict[str, list] = {split: [] for split in SPLITS}
    for unit in plan.units:
        read[unit.split] += as_lists(read_block(unit.block, spec), spec)
    return read


@pytest.mark.parametrize("block_bytes", [1500, 5000, 1 << 20])
@pytest.mark.parametrize("limit", [None, 100])
def test_formats_give_the_same_rows_in_the_same_splits(logs, block_bytes: int, limit) -> None:
    found = {}
    for name, spec in SPECS.items():
        days = find_days(str(logs[name]))
        plan = make_plan(days, spec, block_bytes=block_bytes, limit_rows=limit)
        found[name] = _rows(plan, spec)
        rows = limit or 300
        assert {split: len(rows) for split, rows in found[name].items()} == {
            "train": 2 * rows, "valid": rows // 2, "test": rows // 2
        }  # fmt: skip
        assert abs(plan.estimated_rows() / (3 * rows) - 1) < 0.4  # by the first block
        assert (len(plan.units) == 4) is (block_bytes == 1 << 20)
    assert found["csv"] == found["parquet"]


def test_one_file_is_a_log_of_one_day(logs) -> None:
    for name, ending in (("csv", "csv"), ("parquet", "parquet")):
        (day,) = find_days(str(logs[name] / f"day_2.{ending}"))
        assert day.day == 2
        plan = make_plan([day], SPECS[name], block_bytes=1 << 20)
        assert [unit.split for unit in plan.units] == ["train", "valid", "test"]
        assert [len(rows) for rows in _rows(plan, SPECS[name]).values()] == [240, 30, 30]


def test_a_file_of_any_name_is_day_0(logs, tmp_path: Path) -> None:
    path = tmp_path / "train.csv.gz"
    path.write_bytes(gzip.compress((logs["csv"] / "day_1.csv").read_bytes()))
    (day,) = find_days(str(path), {0})
    assert (day.day, day.compressed) == (0, True)
    (copy,) = _staged(path, tmp_path / "work", RETAIL)
    assert copy.path == str(tmp_path / "work" / "decompressed" / "train.csv")
    assert len(_rows(make_plan([copy], RETAIL, block_bytes=1 << 20), RETAIL)["train"]) == 240
    with pytest.raises(BadInputError, match="missing day_1"):
        find_days(str(path), {1})


@pytest.mark.parametrize("name", list(SPECS))
def test_remote_files(logs, name: str) -> None:
    memory = fsspec.filesystem("memory")
    try:
        for path in logs[name].iterdir():
            memory.pipe_file(f"/remote/{path.name}", path.read_bytes())
        days = find_days("memory://remote")
        assert days[0].path.startswith("memory://")
        local = make_plan(find_days(str(logs[name])), SPECS[name], block_bytes=2500)
        plan = make_plan(days, SPECS[name], block_bytes=2500)
        assert [unit.file for unit in plan.units] == [unit.file for unit in local.units]
        assert _rows(plan, SPECS[name]) == _rows(local, SPECS[name])
        streamed = stream_rows(days[0].path, SPECS[name], block_bytes=999)
        assert [n for numbers, _ in streamed for n in numbers] == list(range(300))
        (day,) = find_days(days[1].path)
        assert day.day == 1
    finally:
        memory.rm("/remote", recursive=True)


def test_a_protocol_that_fsspec_does_not_know() -> None:
    for read in (find_days, lambda path: list(stream_rows(path, CRITEO, block_bytes=99))):
        with pytest.raises(BadInputError, match=r"s4://log/day_0: cannot be opened: Protocol not"):
            read("s4://log/day_0")


def test_formats_that_are_not_what_the_spec_says(logs) -> None:
    with pytest.raises(
        BadInputError, match=r'a parquet file, but the spec has format csv\n.*"parquet"'
    ):
        make_plan(find_days(str(logs["parquet"])), RETAIL, block_bytes=1 << 20)
    with pytest.raises(BadInputError, match="cannot be read as parquet"):
        make_plan(find_days(str(logs["csv"])), SPECS["parquet"], block_bytes=1 << 20)
    with pytest.raises(BadRowError, match="line 1: 1 tab-separated field\n"):
        make_plan(find_days(str(logs["csv"])), CRITEO, block_bytes=1 << 20)


def test_a_column_for_the_split_that_only_the_path_has(tmp_path: Path) -> None:
    path = tmp_path / "dt=2024-01-01" / "part-0.csv"
    path.parent.mkdir()
    path.write_text("click,user\n1,2\n")
    spec = FeatureSpec(
        "click",
        (),
        (CategoricalColumn("user", raw="int"),),
        input=InputFormat("csv"),
        split=Split("time", column="dt", valid=0.1, test=0.1),
    )
    message = "rows without click, dt, .*\n.*the names of directories are not read as columns"
    with pytest.raises(BadRowError, match=message):
        make_plan(find_days(str(path), split=spec.split), spec, block_bytes=1 << 20)
