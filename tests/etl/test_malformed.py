"""What a run left behind, and somebody changed: the marker, the records, the manifest."""

from __future__ import annotations

import contextlib
import json
import types
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.validation import parse, parse_strict_json
from nvt_torchrec.etl.state.output import claim_output
from nvt_torchrec.etl.state.run_record import begin_or_resume, plan_record
from nvt_torchrec.etl.units.writing import UnitRecord
from nvt_torchrec.formats.manifest import FORMAT, Manifest
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
            OutputError, match=r"\.unfinished: .* is not the name of a run's state\n.*--rest"
        ),
        claim_output(output, restart=False) as work,
    ):
        write_json(work / "plan.json", {})
    assert set(tmp_path.rglob("*")) == before
    with claim_output(output, restart=True) as work:
        assert work.parent == output / ".work"


def test_a_marker_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / ".unfinished").write_bytes(b"\xff\xfe12345")
    with pytest.raises(OutputError, match="not the name"), claim_output(tmp_path, restart=False):
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


def test_an_output_with_nothing_but_its_work(tmp_path: Path) -> None:
    """A thread that was still at work after Ctrl-C in a notebook leaves that."""
    (tmp_path / ".work" / "01234567").mkdir(parents=True)
    with claim_output(tmp_path, restart=False) as work:
        write_json(work / "plan.json", {})
    (tmp_path / ".unfinished").unlink()
    (tmp_path / "other").touch()
    with (
        pytest.raises(OutputError, match=r"holds \.work, other"),
        claim_output(tmp_path, restart=False),
    ):
        pass


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


def _sign(file: Path) -> None:
    """Write the digest of what a manifest says, if it is JSON."""
    with contextlib.suppress(ValueError):
        value = parse_strict_json(file.read_text())
        if isinstance(value, dict):
            file.write_text(json.dumps(value | {FORMAT.digest_key: FORMAT.digest(value)}))


def test_manifests(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    write_manifest(file)
    assert Manifest.read(file) == PLAIN
    value = read_json(file, "a manifest")
    assert list(value) == [
        "format_version", "generation", "settings", "extensions", "inputs", "rows", "days",
        "splits", "by_day_and_split", "by_day", "num_embeddings_per_feature", "workflow_digest",
        "versions", "files", "next_parts", "described", "blake2b",
    ]  # fmt: skip
    expect_own_errors(file, lambda: Manifest.read(file), rounds=300, after=lambda: _sign(file))
    write_json(file, {**value, "format_version": 1})
    with pytest.raises(SchemaError, match=r"manifest\.json: format version 1, this program reads"):
        Manifest.read(file)
    write_json(file, {**value, "rows": {"in": 2, "out": 2, "rejected": 0}})
    with pytest.raises(BadInputError, match="not what was written"):
        Manifest.read(file)
    write_json(file, {**value, "generation": None})
    _sign(file)
    with pytest.raises(BadInputError, match="generation: expected an integer, got None"):
        Manifest.read(file)
    del value["files"][0]["day"]
    write_json(file, value)
    _sign(file)
    with pytest.raises(BadInputError, match=r"manifest\.json: damaged: files\[0\]\.day is missing"):
        Manifest.read(file)
