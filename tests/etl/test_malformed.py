"""What a run left behind, and somebody changed: the marker, the records, the manifest."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.etl.state.output import claimed
from nvt_torchrec.etl.state.record import begin_or_resume, plan_record
from nvt_torchrec.etl.units.writing import UnitRecord
from nvt_torchrec.formats.manifest import Manifest
from tests.manifests import PLAIN, write_manifest
from tests.mutations import expect_own_errors, mutated


@pytest.mark.parametrize(
    "name", ["../../x", "/tmp/x", "..", ".", "0123456g", "0123456", "012345678", "a\nb", "\x00"]
)
def test_the_marker_names_a_directory_below_work(tmp_path: Path, name: str) -> None:
    output = tmp_path / "a" / "out"
    output.mkdir(parents=True)
    (output / ".unfinished").write_text(name)
    before = set(tmp_path.rglob("*"))
    with (
        pytest.raises(
            OutputError, match=r"\.unfinished: .* is not a name that a run writes there\n.*--rest"
        ),
        claimed(output, restart=False) as work,
    ):
        write_json(work / "plan.json", {})
    assert set(tmp_path.rglob("*")) == before
    with claimed(output, restart=True) as work:
        assert work.parent == output / ".work"


def test_a_marker_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / ".unfinished").write_bytes(b"\xff\xfe12345")
    with pytest.raises(OutputError, match="not a name"), claimed(tmp_path, restart=False):
        pass


def _begun_or_resumed(work: Path, now: dict) -> None:
    plan = (work / "plan.json").read_bytes()
    try:
        begin_or_resume(work, now, work)
    finally:
        (work / "plan.json").write_bytes(plan)


def test_records_of_a_run(tmp_path: Path) -> None:
    now = plan_record({"a": [1, {"name": "x"}], "b": None}, [])
    now["inputs"] = {"day_0": {"size": 1, "modified": "2"}}
    write_json(tmp_path / "plan.json", now)
    expect_own_errors(tmp_path / "plan.json", lambda: _begun_or_resumed(tmp_path, now), rounds=400)


def test_records_of_units() -> None:
    value = {
        "rows": 3, "bad_count": 1, "positives": 2, "size": 10,
        "bad": [[0, "x"]], "dense_missing": [0], "null": [1], "oov": [0],
    }  # fmt: skip
    unit = types.SimpleNamespace(file="train/part.0.parquet")
    for seed in range(300):
        try:
            parse(UnitRecord, mutated(value, seed), "x").result(unit)
        except BadInputError:  # it is done again
            continue


def test_manifests(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    write_manifest(file)
    assert Manifest.read(file) == PLAIN
    value = read_json(file, "a manifest")
    assert list(value) == [
        "format_version", "generation", "settings", "extensions", "inputs", "rows", "days",
        "splits", "by_day_and_split", "by_day", "num_embeddings_per_feature", "workflow_digest",
        "versions", "files", "next_parts",
    ]  # fmt: skip
    expect_own_errors(file, lambda: Manifest.read(file), rounds=300)
    write_json(file, {**value, "format_version": 1})
    with pytest.raises(SchemaError, match=r"manifest\.json: format version 1, this program reads"):
        Manifest.read(file)
    write_json(file, {**value, "rows": {"in": 1}})
    with pytest.raises(BadInputError, match="damaged: rows in"):
        Manifest.read(file)
    write_json(file, {**value, "generation": None})
    with pytest.raises(BadInputError, match="generation is None, an integer is needed"):
        Manifest.read(file)
    del value["files"][0]["day"]
    write_json(file, value)
    with pytest.raises(BadInputError, match=r"manifest\.json: damaged: files\[0\]\.day is missing"):
        Manifest.read(file)
