"""Delta tables that ``deltalake`` wrote: guess, run, extend, predict; what is refused."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import os
import shutil
import string
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.clicklog.readers.log_format import format_of, read_block
from nvt_torchrec.etl.__main__ import main as etl
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.inference.bulk import predict_file
from tests.etl.runs import settings
from tests.inference.test_export import random_bundle
from tests.shell import python

SPEC = FeatureSpec(
    "click",
    (DenseColumn("price", raw="float"),),
    (
        CategoricalColumn("user", raw="string"),
        CategoricalColumn("tags", raw="string", multi_hot=True),
        CategoricalColumn("country", raw="string"),
    ),
    input=InputFormat("delta"),
)


def deletion() -> dict:
    """Return a deletion vector of the rows 3 and 4, a Roaring bitmap in the log itself."""
    bitmap = struct.pack("<IIHHIHH", 12346, 1, 0, 1, 16, 3, 4)
    vector = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    ours = (
        string.digits + string.ascii_uppercase + string.ascii_lowercase + "!#$%&()*+-;<=>?@^_`{|}~"
    )
    z85 = string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#"
    text = base64.b85encode(vector).decode().translate(str.maketrans(ours, z85))
    size = len(vector)
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": size, "cardinality": 2}


def rows_of(day: int, rows: int = 120) -> pa.Table:
    rng = np.random.default_rng(day)
    columns = {
        "date": [datetime.date(2024, 10, day)] * rows,
        "click": rng.integers(0, 2, rows),
        "price": [None if i % 7 == 0 else float(i) for i in rng.integers(0, 90, rows)],
        "user": [f"u{i}" for i in rng.integers(0, 9, rows)],
        "tags": [["a", "b"][: i % 3] for i in range(rows)],
        "country": rng.choice(["DE", "F R", "é/:"], rows).tolist(),
    }
    return pa.table(columns)


def write(path: Path, *days: int, rows: int = 120, by: tuple[str, ...] = ("date",)) -> Path:
    """Append days, each in a version of its own."""
    for day in days:
        write_deltalake(path, rows_of(day, rows), mode="append", partition_by=list(by))
    return path


def written(out: Path) -> list[str]:
    """Return the rows of all parts, sorted: a day's order is that of the table's files."""
    parts = (out / "criteo_binary" / "split").glob("*/part*")
    return sorted(str(row) for part in parts for row in pq.read_table(part).to_pylist())


def log(path: Path, value: dict, version: int) -> None:
    """Append an action to a version of the log."""
    with open(path / "_delta_log" / f"{version:020}.json", "a") as file:
        file.write(json.dumps(value) + "\n")


def action(path: Path, kind: str) -> dict:
    """Return the first action of a kind in the first version of the log."""
    lines = (path / "_delta_log" / f"{0:020}.json").read_text().splitlines()
    return next(json.loads(line) for line in lines if f'"{kind}"' in line)


def test_days_are_partitions_and_equal_parquet(tmp_path: Path) -> None:
    """A run, then an extension by a partition: rows and ids are those of parquet files."""
    table, files = write(tmp_path / "clicks", 28, 29, by=("date", "country")), tmp_path / "raw"
    files.mkdir()
    for day in (28, 29, 30):
        pq.write_table(rows_of(day), files / f"2024-10-{day}.parquet")
    as_parquet = dataclasses.replace(SPEC, input=InputFormat("parquet"))
    manifest = run(settings(table, tmp_path / "out", SPEC))
    same = run(settings(files, tmp_path / "same", as_parquet, days=frozenset({20024, 20025})))
    assert [file.path for file in manifest.inputs] == [
        f"{table}@v1/date=2024-10-28", f"{table}@v1/date=2024-10-29"
    ]  # fmt: skip
    assert manifest.day_titles == same.day_titles == {20024: "2024-10-28", 20025: "2024-10-29"}
    assert manifest.rows == same.rows == {"in": 240, "out": 240, "rejected": 0}

    write(table, 30, by=("date", "country"))
    for out, raw in ((tmp_path / "out", table), (tmp_path / "same", files)):
        extend = ["extend", "--output_path", str(out), "--input_path", str(raw)]
        assert etl(extend) == 0
        assert etl(extend) == 0  # nothing to do
    assert written(tmp_path / "out") == written(tmp_path / "same")
    manifest = Manifest.read(tmp_path / "out" / "manifest.json")
    assert manifest.inputs[2].path == f"{table}@v2/date=2024-10-30"
    with pytest.raises(OutputError, match=r"@v1/date=2024-10-28: no longer there"):
        run(settings(table, tmp_path / "out", SPEC))
    run(settings(f"{table}@v1", tmp_path / "out", SPEC))  # the version that was read


def test_one_table_is_a_day_whose_rows_come_as_they_were_added(tmp_path: Path) -> None:
    table = write(tmp_path / "day_3", 28, 29, rows=50, by=())
    later = rows_of(30, 20).drop(["country"]).append_column("new", pa.array(range(20)))
    write_deltalake(table, later, mode="append", schema_mode="merge")
    (day,) = find_days(str(table))
    assert (day.day, day.path) == (3, f"{table}@v2")
    opened = format_of(SPEC).open(day)
    whole = pa.concat_tables([rows_of(28, 50), rows_of(29, 50), later], promote_options="default")
    for size in (1 << 20, 400):
        blocks = opened.cut(0, opened.end, size)
        read = [read_block(block, SPEC) for block in blocks]
        users = [user for rows in read for user in rows.categorical[0].to_pylist()]
        assert users == whole["user"].to_pylist()
        countries = [value for rows in read for value in rows.categorical[2].to_pylist()]
        assert countries == [value or "" for value in whole["country"].to_pylist()]
    assert len(blocks) > 10
    pieces = format_of(SPEC).stream(f"{table}@v0", 1 << 20)
    assert sum(len(piece.parse()) for piece in pieces) == 50
    shutil.copytree(table, tmp_path / "copy")
    assert find_days(str(tmp_path / "copy"))[0].digest == day.digest


def test_guess_makes_a_spec_that_runs(tmp_path: Path) -> None:
    table = write(tmp_path / "clicks", 28, 29, 30)
    assert etl(["guess", str(table), "--output", str(tmp_path / "spec.toml")]) == 0
    spec = load_spec(tmp_path / "spec.toml")
    assert spec.input.format == "delta"
    assert "user" in spec.categorical_names
    assert run(settings(table, tmp_path / "out", spec)).rows["out"] == 360


@pytest.mark.parametrize("by", ["share", "days"])
def test_predict_reads_tables(tmp_path: Path, by: str) -> None:
    table = write(tmp_path / "clicks", 28, 29)
    spec = SPEC if by == "days" else dataclasses.replace(SPEC, split=Split("share", 0.1, 0.2))
    manifest = run(settings(table, tmp_path / "out", spec))
    assert len(manifest.inputs) == (2 if by == "days" else 1)
    predictor = random_bundle(tmp_path / "out" / "workflow", tmp_path / "bundle", 0)
    scores = tmp_path / "scores.parquet"
    scored = predict_file(predictor, str(table), scores, id_columns=("user", "date"))
    result = pq.read_table(scores)
    assert scored.rows == len(result) == 240
    assert result["date"].to_pylist() == [
        datetime.date(2024, 10, 28 + i // 120) for i in range(240)
    ]
    pq.write_table(pa.concat_tables([rows_of(28), rows_of(29)]), tmp_path / "rows.parquet")
    predict_file(predictor, str(tmp_path / "rows.parquet"), tmp_path / "same.parquet")
    same = pq.read_table(tmp_path / "same.parquet")
    assert result["probability"].equals(same["probability"])


def test_a_run_does_not_mind_later_versions(tmp_path: Path, monkeypatch) -> None:
    """A table grows while it is read: the run ends with the version that it began with."""
    from nvt_torchrec.etl import stages

    table, count = write(tmp_path / "clicks", 28, 29), stages.Stages.count_and_encode
    monkeypatch.setattr(
        stages.Stages, "count_and_encode", lambda *args: (write(table, 28, 30), count(*args))[1]
    )
    assert run(settings(table, tmp_path / "out", SPEC)).rows["in"] == 240


def test_what_is_refused(tmp_path: Path) -> None:
    table = write(tmp_path / "clicks", 28, 29)

    def refused(what: str, path: object, spec: FeatureSpec = SPEC) -> None:
        with pytest.raises(ClickLogError, match=what):
            format_of(spec).open(find_days(str(path), split=spec.split)[0])

    by_files = Split("files", train_files=("a",), valid_files=("b",), test_files=("c",))
    refused("a Delta table, split by files", table, dataclasses.replace(SPEC, split=by_files))
    refused("the newest version is 1", f"{table}@v99999999999999999")
    refused("no such file or directory", f"{table}@v{'9' * 30}")
    refused("date=2024-10-27: no rows", f"{table}/date=2024-10-27")
    as_parquet = dataclasses.replace(SPEC, input=InputFormat("parquet"))
    refused("cannot be read as parquet", table, as_parquet)
    odd = dataclasses.replace(SPEC.dense[0], name="nothing")
    refused("column nothing is not there", table, dataclasses.replace(SPEC, dense=(odd,)))
    (tmp_path / "raw").mkdir()
    with pytest.raises(BadInputError, match="raw: no Delta table"):
        list(format_of(SPEC).stream(str(tmp_path / "raw"), 1 << 20))

    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "writerFeatures": ["deletionVectors"]}
    deleted = shutil.copytree(table, tmp_path / "deleted")
    log(deleted, {"protocol": {**protocol, "readerFeatures": ["deletionVectors"]}}, 2)
    assert len(find_days(str(deleted))) == 2  # there might be deletion vectors, and there are none
    add = action(deleted, "add")["add"]
    log(deleted, {"remove": {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}}, 3)
    log(deleted, {"add": {**add, "deletionVector": deletion()}}, 3)
    refused(r"deleted@v3: a Delta table with deletion vectors is not read", deleted)

    mapped = shutil.copytree(table, tmp_path / "mapped")
    meta = action(mapped, "metaData")
    meta["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}
    schema = json.loads(meta["metaData"]["schemaString"])
    for number, field in enumerate(schema["fields"]):
        names = {"physicalName": field["name"], "id": number + 1}
        field["metadata"] = {f"delta.columnMapping.{key}": value for key, value in names.items()}
    meta["metaData"]["schemaString"] = json.dumps(schema)
    features = ["columnMapping", "variantType"]
    both = {"readerFeatures": features, "writerFeatures": features}
    log(mapped, {"protocol": {**protocol, **both}}, 2)
    log(mapped, meta, 2)
    refused("a Delta table with columns mapped by name, variantType is not read", mapped)


def test_a_log_that_names_what_is_elsewhere(tmp_path: Path) -> None:
    """Nothing but files below the table is opened, and rows are counted there."""
    table = write(tmp_path / "clicks", 28)
    add = action(table, "add")
    stats = {**json.loads(add["add"]["stats"]), "numRecords": 10**12}
    changes = [{"stats": json.dumps(stats)}, {"path": "fifo"}]
    elsewhere = "github://o:r@main/x zip::x ../x %2e%2e/x a/.. file:///x http://a/x /x a%00b"
    changes += [{"path": path} for path in elsewhere.split()]
    for number, change in enumerate(changes):
        copy = shutil.copytree(table, tmp_path / str(number))
        os.mkfifo(copy / "fifo")
        log_file = copy / "_delta_log" / f"{0:020}.json"
        lines = [line for line in log_file.read_text().splitlines() if '"add"' not in line]
        lines.append(json.dumps({"add": {**add["add"], **change}}))
        log_file.write_text("\n".join(lines))
        if "stats" in change:
            pieces = format_of(SPEC).stream(str(copy), 1 << 20)
            assert sum(len(piece.parse()) for piece in pieces) == 120
            continue
        with pytest.raises(BadInputError, match=r"is not below the table|not a regular file"):
            next(format_of(SPEC).stream(str(copy), 1 << 20))


def test_without_the_package(tmp_path: Path) -> None:
    table = write(tmp_path / "clicks", 28, 29)
    code = (
        "import sys; sys.modules['deltalake'] = None\n"
        "from nvt_torchrec.clicklog.readers.days import find_days\n"
        f"find_days({str(table)!r})"
    )
    result = python("-c", code)
    assert "the package deltalake is not installed\n  -> run `pip install" in result.stderr
    assert DeltaTable(table).version() == 1
