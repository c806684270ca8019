"""Adding days to outputs whose rows are split by share, column or time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.workflows.description import inspect
from tests.etl.extended import add, assert_sound, copy_of, make_base, refused
from tests.etl.runs import QUARANTINE, read_split, settings
from tests.etl.split_logs import NAMES, SHARES_OF_TIME, SPLITS_OF_ROWS, numbers_of, spec_with, write

ROWS = {0: 90, 1: 70, 2: 60, 3: 45, 4: 52, 5: 38}
NEW = (3, 4, 5)


def _ids(rows: dict[int, dict[str, str]], train: list[int], name: str, threshold: int) -> dict:
    """The ids of a column's values after all days, by the rule of extensions."""
    ids: dict[str, int] = {}
    seen: Counter = Counter()
    base = range(min(NEW) * 1000)
    groups = [range(1000 * day, 1000 * day + 1000) for day in sorted({n // 1000 for n in rows})]
    for own in (base, *groups[min(NEW) :]):
        seen.update(rows[row][name] for row in train if row in own)
        earned = [value for value in seen if seen[value] >= threshold and value not in ids]
        for value in sorted(earned, key=lambda value: (-seen[value], value.encode())):
            ids[value] = 3 + len(ids)
    return ids


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("log") / "raw"
    write(directory, ROWS)
    return directory


@pytest.fixture(scope="module")
def bases(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Generation 0, of days 0 to 2, by the rule of the split."""
    directory = tmp_path_factory.mktemp("bases")
    return {
        name: make_base(raw, directory / name, spec_with(split))
        for name, split in SPLITS_OF_ROWS.items()
    }


@pytest.mark.parametrize("name", SPLITS_OF_ROWS)
@given(
    counts=st.lists(st.sampled_from([1, 2, 30, 41, 80]), min_size=1, max_size=3),
    at_once=st.booleans(),
    workers=st.integers(1, 3),
)
@hypothesis_settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_splits_are_those_of_a_run_over_all_days(
    tmp_path_factory, raw: Path, bases, name: str, counts, at_once: bool, workers: int
) -> None:
    """And ids are given in the order of the days, by counts of training rows only."""
    directory = tmp_path_factory.mktemp("rows")
    few = 30 if name == "time" else 1  # a day without training rows cannot be added by time
    days = {3 + i: max(few, count) for i, count in enumerate(counts)}
    rows = write(directory / "raw", {0: ROWS[0], 1: ROWS[1], 2: ROWS[2]} | days)
    output = copy_of(bases[name], directory)
    options = {"workers": workers, "max_rows_factor": float("inf")}
    for group in [days] if at_once else [{day} for day in days]:
        add(output, directory / "raw", days=group, **options)
    spec = spec_with(SPLITS_OF_ROWS[name])
    run(settings(directory / "raw", directory / "fresh", spec, workers=workers))
    found = numbers_of(output)
    assert found == numbers_of(directory / "fresh")
    assert sum(map(len, found.values())) == len(rows)
    for column, threshold in (("item", 1), ("rare", 3)):
        ids = _ids(rows, found["train"], column, threshold)
        for split in SPLITS:
            expected = [ids.get(rows[row][column], 2) for row in found[split]]
            assert read_split(output, split)[column].tolist() == expected
    assert_sound(output)


def test_the_size_of_blocks_changes_no_split(tmp_path: Path) -> None:
    """A row's number counts from the begin of its file."""
    spec = spec_with(SPLITS_OF_ROWS["share"])
    write(tmp_path / "raw", {0: 90, 1: 70, 2: 60})
    base = make_base(tmp_path / "raw", tmp_path / "base", spec)
    write(tmp_path / "raw", {3: 300}, width=9000)
    found = []
    for block_mb in (1, 64):
        output = copy_of(base, tmp_path / str(block_mb))
        manifest = add(output, tmp_path / "raw", block_mb=block_mb)
        found.append((numbers_of(output), [read_split(output, s)["item"].tolist() for s in SPLITS]))
        parts = [part for part in EtlOutput(output).parts("train") if part.day == 3]
        assert len(parts) == (3 if block_mb == 1 else 1)
        assert manifest["by_day"]["3"]["rows"] == 300
    assert found[0] == found[1]


@pytest.mark.parametrize("name", SPLITS_OF_ROWS)
def test_what_describes_the_output(raw: Path, bases, tmp_path: Path, name: str) -> None:
    output = copy_of(bases[name], tmp_path)
    before = json.loads((output / "manifest.json").read_text())
    manifest = add(output, raw)
    assert manifest["split"] == before["split"]
    assert manifest["days"]["train"] == list(ROWS)
    assert "valid_days" not in manifest["extensions"][0]["settings"]
    for day in ROWS:
        own = manifest["by_day_and_split"][str(day)]
        assert own == before["by_day_and_split"].get(str(day), own)
        assert sum(counts["rows"] for counts in own.values()) == ROWS[day]
    for split in SPLITS:
        frame, counts = read_split(output, split), manifest["splits"][split]
        assert counts["rows"] == len(frame)
        assert counts["out_of_vocabulary"]["rare"] == int((frame["rare"] == 2).sum())
        parts = EtlOutput(output).parts(split)
        assert manifest["next_parts"][split] == len(parts)
        assert [part.generation for part in parts] == sorted(part.generation for part in parts)
    description = inspect(output / "workflow")
    assert [one.days for one in description.lineage] == [(0, 1, 2), (3,), (4,), (5,)]
    spec = spec_with(SPLITS_OF_ROWS[name])
    with pytest.raises(OutputError, match=r"days: \[0, 1, 2\] before, None now"):
        run(settings(raw, output, spec))


def test_a_day_without_training_rows(bases, tmp_path: Path) -> None:
    """By column a day may be of users of other splits; it adds no value, and the next one does."""
    rows = write(tmp_path / "all", ROWS)
    valid = next(row for row in numbers_of(bases["column"])["valid"])
    user = rows[valid]["user"]
    raw = tmp_path / "raw"
    write(raw, {3: 20, 4: 40})
    lines = (raw / "day_3.csv").read_text().splitlines()
    fields = [line.split(",") for line in lines[1:]]
    for own in fields:
        own[NAMES.index("user")] = user
    (raw / "day_3.csv").write_text("\n".join([lines[0], *map(",".join, fields)]) + "\n")
    output = copy_of(bases["column"], tmp_path)
    before = inspect(output / "workflow")
    manifest = add(output, raw / "day_3.csv")
    counts = manifest["by_day_and_split"]["3"]
    assert {split: own["rows"] for split, own in counts.items()} == {
        "train": 0, "valid": 20, "test": 0
    }  # fmt: skip
    after = inspect(output / "workflow")
    assert before.table_schema == after.table_schema
    assert before.statistics == after.statistics
    assert_sound(output)
    assert add(output, raw / "day_4.csv")["generation"] == 2
    assert_sound(output)


def test_bad_rows_are_rejected_once(raw: Path, bases, tmp_path: Path) -> None:
    """Also where days are directories, whose files have one name."""
    output = copy_of(bases["share"], tmp_path)
    for day in (3, 4):
        lines = (raw / f"day_{day}.csv").read_text().splitlines()
        lines[day * 2 : day * 2] = ["bad", "worse"]
        own = tmp_path / "new" / f"day={day}"
        own.mkdir(parents=True)
        (own / "clicks.csv").write_text("\n".join(lines) + "\n")
        manifest = add(output, own / "clicks.csv", **QUARANTINE)
        assert manifest["inputs"][-1]["rows"] == {
            "in": ROWS[day] + 2, "out": ROWS[day], "rejected": 2
        }  # fmt: skip
    rejected = sorted((output / "rejected").iterdir())
    assert [path.name for path in rejected] == ["4.clicks.csv.tsv", "clicks.csv.tsv"]
    lines = [path.read_bytes().splitlines()[1:] for path in rejected]
    assert [[line.split(b"\t")[1] for line in own] for own in lines] == [
        [b"9", b"10"],
        [b"7", b"8"],
    ]
    assert_sound(output)


def test_without_any_well_formed_row(raw: Path, bases, tmp_path: Path) -> None:
    output = copy_of(bases["share"], tmp_path)
    (tmp_path / "day_3.csv").write_text(",".join(NAMES) + "\nbad\n")
    options = QUARANTINE | {"max_bad_fraction": 1.0, "max_rows_factor": 99.0}
    with pytest.raises(BadInputError, match=r"day_3\.csv: no well-formed row"):
        add(output, tmp_path / "day_3.csv", **options)
    assert add(output, raw / "day_3.csv", restart=True)["generation"] == 1
    (tmp_path / "day_4.csv").write_text(",".join(NAMES) + "\n")
    with pytest.raises(BadInputError, match=r"day_4\.csv.* no rows"):
        add(output, tmp_path / "day_4.csv")


def test_a_day_behind_the_cuts(bases, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By time, later days are for test only, which is said."""
    output = copy_of(bases["time"], tmp_path)
    before = inspect(output / "workflow")
    write(tmp_path / "raw", {3: 30}, later=1000)
    manifest = add(output, tmp_path / "raw" / "day_3.csv")
    counts = manifest["by_day_and_split"]["3"]
    assert {split: own["rows"] for split, own in counts.items()} == {
        "train": 0, "valid": 0, "test": 30
    }  # fmt: skip
    assert inspect(output / "workflow").table_schema == before.table_schema
    assert "for training, because none is before 1970-01-01 00:10" in caplog.text
    assert "run the ETL again over all files with a later valid_from" in caplog.text
    assert_sound(output)


def test_splits_that_would_change_are_refused(raw: Path, tmp_path: Path) -> None:
    """Cuts of shares by time, and given files."""
    by_files = Split("files", train_files=("day_0.csv",), valid=0.2, test_files=("day_1.csv",))
    for by, split, what in (
        ("time", SHARES_OF_TIME, r'move the cuts(.|\n)*valid_from = "1970-01-01 00:\d\d:\d\d'),
        ("files", by_files, r"split by files(.|\n)*run the ETL again"),
    ):
        output = tmp_path / by
        days = None if by == "files" else frozenset({0, 1, 2})
        run(settings(raw, output, spec_with(split), days=days))
        refused(output, raw / "day_3.csv", what)
