"""Vectors of tables: each row leads to that of its key, in any format, engine, day and version."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import (
    BadInputError,
    BadRowError,
    OutputError,
    SettingsError,
)
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.vectors import VECTORS, StoredVectors
from nvt_torchrec.workflows.inspection import report
from tests.etl.runs import QUARANTINE, failing, settings, tree
from tests.etl.vector_logs import (
    DAY,
    EVENTS,
    VERSIONS,
    Item,
    assert_vectors,
    count_vectors,
    expected_vectors,
    load_vector_spec,
    make_items,
    make_rows,
    read_rows,
    read_vectors,
    write_days,
    write_items,
)
from tests.logs import pack

HOUR = 3600


def count_runs(items: list[Item], name: str) -> int:
    """How many vectors versions have, those that repeat the one before counted once."""
    count = 0
    for number in {item.id for item in items}:
        before: tuple = ()
        versions = [item for item in items if item.id == number]
        for item in sorted(versions, key=lambda item: item.changed):
            value = getattr(item, name)
            count += bool(value) and value != before
            before = value
    return count


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "jsonl", "parquet", "fixed.parquet"])
@pytest.mark.parametrize("versions", ["", VERSIONS])
def test_each_row_leads_to_the_vector_of_its_key(
    tmp_path: Path, ending: str, versions: str
) -> None:
    raw = tmp_path / "raw"
    items, rows = make_items(versions=6 if versions else 1), make_rows(400, 3)
    write_days(raw, rows)
    half = len(items) // 2  # a table may have several files
    for number, part in enumerate((items[:half], items[half:])):
        file = raw / f"items_{number}.{ending.removesuffix('.gz')}"
        write_items(file, part, fixed="fixed" in ending)
        if ending.endswith(".gz"):
            pack(file)
    spec = load_vector_spec(tmp_path, versions=versions, more=EVENTS if versions else "")
    run(settings(raw, tmp_path / "out", spec))
    assert_vectors(tmp_path / "out", rows, items, delay=HOUR if versions else None)
    expected = [count_runs(items, name) for name in ("embedding", "image")]
    assert count_vectors(tmp_path / "out") == expected
    found = read_rows(tmp_path / "out")
    assert found.columns[-2:].tolist() == ["text.vector", "image.vector"]
    for split_file in (tmp_path / "out/criteo_binary/split/_vectors").rglob("*.npy"):
        name = split_file.relative_to(tmp_path / "out/criteo_binary/split/_vectors")
        assert split_file.samefile(tmp_path / "out/workflow/vectors" / name)


def test_nothing_depends_on_workers_and_engine(tmp_path: Path, dask_client) -> None:
    raw = tmp_path / "raw"
    write_days(raw, make_rows(400, 3))
    write_items(raw / "items.parquet", make_items(versions=6))
    spec = load_vector_spec(tmp_path, versions=VERSIONS, more=EVENTS)
    run(settings(raw, tmp_path / "one", spec, workers=1, block_mb=1))
    run(settings(raw, tmp_path / "two", spec, workers=2, block_mb=1))
    address = dask_client.scheduler.address
    run(settings(raw, tmp_path / "dask", spec, scheduler=address, block_mb=1))
    expected = tree(tmp_path / "one")
    assert tree(tmp_path / "two") == expected
    for name in ("criteo_binary", "workflow"):
        assert tree(tmp_path / "dask" / name) == tree(tmp_path / "one" / name)


def test_many_blocks_of_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of files, and blocks that are compared and copied, are as small as a row."""
    raw = tmp_path / "raw"
    items, rows = make_items(versions=8), make_rows(300, 3)
    write_days(raw, rows)
    write_items(raw / "items.parquet", items, fixed=True)
    spec = load_vector_spec(tmp_path, versions=VERSIONS)
    run(settings(raw, tmp_path / "whole", spec))
    monkeypatch.setattr("nvt_torchrec.etl.tables.vector_writer._BLOCK_BYTES", 20)
    monkeypatch.setattr("nvt_torchrec.etl.tables.table_writer._BLOCK_BYTES", 100)
    monkeypatch.setattr("nvt_torchrec.formats.vectors._BLOCK_VALUES", 5)
    run(settings(raw, tmp_path / "out", spec))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert_vectors(tmp_path / "out", rows, items, delay=HOUR)


def newest(output: Path) -> dict[str, object]:
    """The files of an output without those of the generation before."""
    return {name: file for name, file in tree(output).items() if not name.startswith(".previous/")}


def read_files(directory: Path) -> dict[str, bytes]:
    """The files of all vectors, by their paths."""
    return {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*.npy")}


@pytest.mark.parametrize("versions", ["", VERSIONS])
def test_a_new_day_adds_vectors_and_undo_takes_them_back(tmp_path: Path, versions: str) -> None:
    raw = tmp_path / "raw"
    rows, today = make_rows(600, 5), make_items(versions=3 if versions else 1)
    write_days(raw, [row for row in rows if row.time // DAY < 3])
    write_items(raw / "items.csv", today)
    delay = HOUR if versions else None
    spec = load_vector_spec(tmp_path, versions=versions)
    out = tmp_path / "out"
    run(settings(raw, out, spec))
    splits = out / "criteo_binary/split" / VECTORS
    trees, stores = [newest(out)], [read_files(splits)]
    known = {(item.id, item.changed if versions else 0): item for item in today}
    # Of day 3 some items are as they were, some have another vector, one is new; of day 4 the files
    # have the same rows again, which adds no vector.
    changed = make_items(1, versions=2 if versions else 1, first_day=2)[:8]
    new = Item(11, 2 * DAY, 1.5, (1.0, 2.0, 3.0), ())
    changes = [*today[:5], *changed, new]
    changes = list({(item.id, item.changed if versions else 0): item for item in changes}.values())
    for day, table in ((3, changes), (4, changes)):
        later = tmp_path / f"raw_{day}"
        write_days(later, [row for row in rows if row.time // DAY == day])
        write_items(later / "new_items.parquet", table)
        known |= {(item.id, item.changed if versions else 0): item for item in table}
        paths = (f"items={later / 'new_items.parquet'}",)
        extend(ExtendSettings(out, str(later / f"day_{day}.csv"), table=paths))
        of_day = [row for row in rows if row.time // DAY == day]
        found = read_rows(out)
        expected = expected_vectors([*known.values()], of_day, delay=delay)
        np.testing.assert_array_equal(read_vectors(out, found[-len(of_day) :]), expected)
        trees.append(newest(out))
        stores.append(read_files(splits))
    for earlier, later_files in itertools.pairwise(stores):
        assert earlier.items() <= later_files.items()  # no old part ever changes
    assert len(stores[1]) > len(stores[0])
    assert stores[2] == stores[1]
    extend(ExtendSettings(out, undo=True))
    assert newest(out) == trees[1]
    assert read_files(splits) == stores[1]


def test_a_day_without_files_takes_the_vectors_as_they_are(tmp_path: Path) -> None:
    raw, later = tmp_path / "raw", tmp_path / "later"
    rows, items = make_rows(400, 4), make_items(versions=3)
    write_days(raw, [row for row in rows if row.time // DAY < 3])
    write_days(later, [row for row in rows if row.time // DAY == 3])
    write_items(raw / "items.csv", items)
    run(settings(raw, tmp_path / "out", load_vector_spec(tmp_path, versions=VERSIONS)))
    before = count_vectors(tmp_path / "out")
    extend(ExtendSettings(tmp_path / "out", str(later)))
    assert count_vectors(tmp_path / "out") == before
    assert_vectors(tmp_path / "out", rows, items, delay=HOUR)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_days(raw, make_rows(200, 3))
    write_items(raw / "items.csv", make_items(versions=3))
    spec = load_vector_spec(tmp_path, versions=VERSIONS, more=EVENTS)
    run(settings(raw, tmp_path / "whole", spec))
    stop = KeyboardInterrupt("ctrl-c")
    for place in (
        "nvt_torchrec.etl.tables.vector_writer.VectorNumbers.write",
        "nvt_torchrec.formats.vectors.VectorWriter.finish",
        "nvt_torchrec.workflows.writer.link_vectors",
        "nvt_torchrec.etl.run.link_vectors",
    ):
        with failing(place, stop, after=1):  # at the second vector
            run(settings(raw, tmp_path / "out", spec))
    run(settings(raw, tmp_path / "out", spec))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_an_interrupted_extension_goes_on(tmp_path: Path) -> None:
    raw, later = tmp_path / "raw", tmp_path / "later"
    rows = make_rows(300, 4)
    write_days(raw, [row for row in rows if row.time // DAY < 3])
    write_days(later, [row for row in rows if row.time // DAY == 3])
    write_items(raw / "items.csv", make_items(versions=3))
    write_items(later / "items_3.csv", make_items(1, versions=2, first_day=2))
    spec = load_vector_spec(tmp_path, versions=VERSIONS)
    for name in ("out", "whole"):
        run(settings(raw, tmp_path / name, spec))
    day = ExtendSettings(
        tmp_path / "out", str(later / "day_3.csv"), table=(f"items={later / 'items_3.csv'}",)
    )
    extend(dataclasses.replace(day, output_path=tmp_path / "whole"))
    before = tree(tmp_path / "out")
    for place, error in (
        ("nvt_torchrec.etl.tables.table_writer.link_vectors", KeyboardInterrupt("ctrl-c")),
        ("nvt_torchrec.formats.vectors.VectorWriter.finish", KeyboardInterrupt("ctrl-c")),
        ("nvt_torchrec.etl.extend.extend.link_vectors", KeyboardInterrupt("ctrl-c")),
        ("nvt_torchrec.etl.extend.extend.switch", OutputError("stop here")),
    ):
        with failing(place, error):
            extend(day)
        assert {name: tree(tmp_path / "out")[name] for name in before} == before
    extend(ExtendSettings(tmp_path / "out", resume=True))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_drawn_row_has_the_vector_of_its_item(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    rows = [dataclasses.replace(row, clicked=1) for row in make_rows(300, 3)]
    rows = [row for row in rows if row.item >= 0]
    items = make_items()
    write_days(raw, rows)
    write_items(raw / "items.csv", items)
    negatives = '[negatives]\nitem = "item"\nuser = "user"\nper_positive = 2'
    # A price of its own tells which item a row has.
    items = [dataclasses.replace(item, price=float(item.id)) for item in items]
    write_items(raw / "items.csv", items)
    spec = load_vector_spec(tmp_path, more=negatives, label="value = 1")
    run(settings(raw, tmp_path / "out", spec))
    found = read_rows(tmp_path / "out")
    vectors = read_vectors(tmp_path / "out", found)
    assert (found["clicked"] == 0).sum() > 100
    by_item: dict[int, np.ndarray] = {}
    for item, vector in zip(found["item"], vectors, strict=True):
        np.testing.assert_array_equal(by_item.setdefault(item, vector), vector)
    known = [(*item.embedding, 1) for item in items if item.embedding]
    stored = {tuple(vector[:4].tolist()) for vector in vectors if vector[3]}
    assert stored <= {tuple(np.array(v, np.float32).tolist()) for v in known}
    assert len(stored) > 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("13,0,1,0.5|1,1|2", "line 12: column embedding: 2 values instead of 3: expected a vector"),
        ("13,0,1,1|2|3|4,1|2", "line 12: column embedding: 4 values instead of 3"),
        ("13,0,1,1|x|3,1|2", "line 12: column embedding: 'x': expected a number"),
        ("13,0,1,1||3,1|2", "line 12: column embedding: '': a list must not hold"),
        ("13,0,1,1|nan|3,1|2", "line 12: column embedding: 'nan': expected a number"),
        ("13,0,1,1|inf|3,1|2", "line 12: column embedding: 'inf': expected a number"),
        ("13,0,1,1|1e39|3,1|2", "line 12: column embedding: '1e39': expected a finite number"),
        ("13,0,1,1|2|3,65520|2", "line 12: column image: 65520.0: expected numbers that fit"),
        ("13,0,1,1|2|3,1|-7e4", "line 12: column image: -70000.0: expected numbers that fit"),
    ],
)
def test_a_wrong_vector_is_named_or_left_out(tmp_path: Path, line: str, message: str) -> None:
    raw = tmp_path / "raw"
    rows = make_rows(200, 3)
    write_days(raw, rows)
    items = make_items()
    write_items(raw / "items.csv", items)
    spec = load_vector_spec(tmp_path)
    run(settings(raw, tmp_path / "whole", spec))
    with open(raw / "items.csv", "a") as file:
        file.write(line + "\n")
    with pytest.raises(BadRowError, match=message.replace("[", r"\[")):
        run(settings(raw, tmp_path / "out", spec))
    run(settings(raw, tmp_path / "left_out", spec, **QUARANTINE))
    assert_vectors(tmp_path / "left_out", rows, items)
    _, rejected = (tmp_path / "left_out/rejected/table.items.tsv").read_text().splitlines()
    assert rejected.split("\t")[1] == "12"
    assert rejected.endswith(line)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, None, 2.0], "a list must not hold a null"),
        ([1.0, float("nan"), 2.0], "a list must not hold an empty value"),
        ([1.0, float("inf"), 2.0], "expected a finite number"),
        ([1.0], "1 values instead of 3"),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_wrong_vector_of_a_typed_file_is_named(
    tmp_path: Path, kind: str, value: list, message: str
) -> None:
    raw = tmp_path / "raw"
    write_days(raw, make_rows(200, 3))
    items = [*make_items(), Item(13, 0, 1.0, tuple(value), (1.0, 2.0))]
    write_items(raw / f"items.{kind}", items)
    with pytest.raises(BadRowError, match=rf"items.{kind}, (line|row) 11: ") as raised:
        run(settings(raw, tmp_path / "out", load_vector_spec(tmp_path)))
    if kind == "parquet":  # JSON has no NaN: such a line is malformed as a whole
        assert message in str(raised.value)


def test_a_table_without_any_vector_is_refused(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_days(raw, make_rows(200, 3))
    items = [dataclasses.replace(item, image=()) for item in make_items()]
    write_items(raw / "items.csv", items)
    with pytest.raises(BadInputError, match="vector image: no row of its table has a vector"):
        run(settings(raw, tmp_path / "out", load_vector_spec(tmp_path)))


def test_the_engine_of_nvtabular_joins_none(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_days(raw, make_rows(50, 3))
    write_items(raw / "items.csv", make_items())
    with pytest.raises(SettingsError, match="table"):
        run(settings(raw, tmp_path / "out", load_vector_spec(tmp_path), engine="nvtabular"))


def test_the_manifest_lists_vectors(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_days(raw, make_rows(200, 3))
    write_items(raw / "items.csv", make_items())
    run(settings(raw, tmp_path / "out", load_vector_spec(tmp_path)))
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    metadata = json.loads((tmp_path / "out/workflow/metadata.json").read_text())
    for name in ("text", "image"):
        of_splits = manifest["described"][f"criteo_binary/split/_vectors/{name}/0/values.npy"]
        assert metadata["files"][f"vectors/{name}/0/values.npy"] == of_splits
    found = read_rows(tmp_path / "out")
    counted = [manifest["splits"][split]["missing"]["text"] for split in SPLITS]
    assert sum(counted) == (found["text.vector"] == -1).sum()
    page = (tmp_path / "out/report.html").read_text()
    assert "<h2>Vectors</h2>" in page
    shown = report(tmp_path / "out/workflow")
    assert re.search(r"text +items +3 +float32 +\d+\n +image +items +2 +float16 +\d+\n", shown)
    schema = TableSchema.read(tmp_path / "out/criteo_binary/split")
    assert schema.vectors == (StoredVectors("text", 3), StoredVectors("image", 2, "float16"))


def test_rows_whose_clicks_are_in_another_file_have_vectors(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    rows, items = make_rows(300, 3), make_items(versions=3)
    write_days(raw, rows)
    write_items(raw / "items.csv", items)
    clicks = ["at,row", *(f"{row.time + 60},{row.row}" for row in rows if row.clicked)]
    (raw / "clicks.csv").write_text("\n".join(clicks) + "\n")
    label = (
        'from = "clicks.csv"\nkey = ["row"]\nwithin = "1h"\ntime = "at"\n'
        'time_format = "epoch_s"\nlog_time = "time"\nlog_time_format = "epoch_s"'
    )
    run(settings(raw, tmp_path / "out", load_vector_spec(tmp_path, versions=VERSIONS, label=label)))
    found = read_rows(tmp_path / "out")
    expected = expected_vectors(items, rows[: len(found)], delay=HOUR)  # others wait
    np.testing.assert_array_equal(read_vectors(tmp_path / "out", found), expected)
    assert 0 < found["clicked"].mean() < 1
