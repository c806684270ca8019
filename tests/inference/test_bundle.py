"""Bundles: a workflow and a model in one directory, and pairs that do not belong together."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.model.bundle import FORMAT as BUNDLE_FORMAT
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.models.checkpoint.record import FORMAT
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.vocabulary import FittedVocabulary
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.inference.conftest import Trained
from tests.inference.test_predictor import criteo_dicts
from tests.mutations import flip_bit


def test_a_bundle_scores_as_its_parts(
    bundle: Path, trained: Trained, predictor: Predictor, tmp_path: Path
) -> None:
    opened = Predictor.load(bundle, check=True)
    rows = criteo_dicts(trained.days[2])
    np.testing.assert_array_equal(opened.predict(rows), predictor.predict(rows))
    assert TableSchema.read(bundle) == inspect(trained.workflow).table_schema
    names = {file.suffix for file in bundle.rglob("*") if file.is_file()}
    assert names == {".json", ".npy", ".parquet"}
    assert not any(str(trained.raw.parent) in file.read_text() for file in bundle.rglob("*.json"))
    output = tmp_path / "p.parquet"
    flags = ["--bundle", str(bundle), "--input", str(trained.raw / "day_2")]
    assert main(["predict", *flags, "--output", str(output)]) == 0
    got = pq.read_table(output)["probability"].to_numpy()
    np.testing.assert_allclose(got, predictor.predict(rows), atol=1e-6)


def test_what_is_there_already(bundle: Path, trained: Trained, tmp_path: Path, capsys) -> None:
    """From the same inputs nothing is done; anything else is not overwritten."""
    before = {file: file.stat().st_mtime_ns for file in bundle.rglob("*")}
    assert main(["bundle", *trained.flags, "--output", str(bundle)]) == 0
    assert "already made from this workflow and checkpoint" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in bundle.rglob("*")} == before
    model = (trained.checkpoint / "model.json").stat()
    assert (bundle / "bundle.json").stat().st_mtime == pytest.approx(model.st_mtime, abs=1e-3)
    for tables, path in (("int8", bundle), ("float32", trained.raw), ("float32", tmp_path / "l")):
        (tmp_path / "l").unlink(missing_ok=True)
        (tmp_path / "l").symlink_to("l")
        with pytest.raises(OutputError, match="exists but is not a bundle of this workflow"):
            write_bundle(trained.workflow, trained.checkpoint, path, tables=tables)
    with pytest.raises(OutputError, match="cannot be written"):
        write_bundle(trained.workflow, trained.checkpoint, "/proc/none/bundle")


def test_only_what_a_workflow_lists_is_copied(trained: Trained, tmp_path: Path) -> None:
    workflow = shutil.copytree(trained.workflow, tmp_path / "workflow")
    os.mkfifo(workflow / "pipe")
    (workflow / "loop").symlink_to("loop")
    (workflow / "secret").symlink_to("/etc/passwd")
    write_bundle(workflow, trained.checkpoint, tmp_path / "bundle")
    assert not {"pipe", "loop", "secret"} & {file.name for file in tmp_path.rglob("bundle/**/*")}
    graph = workflow / "graph.json"
    graph.unlink()
    os.mkfifo(graph)
    with pytest.raises(BadInputError, match=r"graph\.json"):
        write_bundle(workflow, trained.checkpoint, tmp_path / "other")


@pytest.mark.parametrize(
    "file", ["weights/table.npy", "weights/module.top.1.bias.npy", "workflow/metadata.json"]
)
def test_damage(bundle: Path, tmp_path: Path, file: str) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    whole = (copy / file).read_bytes()
    (copy / file).write_bytes(whole[:-1])
    with pytest.raises(BadInputError, match=rf"{file}: \d+ bytes instead of {len(whole)}"):
        Predictor.load(copy)
    (copy / file).write_bytes(whole)
    flip_bit(copy / file, -2)
    with pytest.raises(BadInputError, match=rf"{file}: not the file that was written"):
        Predictor.load(copy, check=True)
    (copy / file).unlink()
    with pytest.raises(BadInputError, match=f"{file}: missing"):
        Predictor.load(copy)


def test_descriptions_that_are_wrong(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    value = read_json(copy / "bundle.json", "a bundle")

    def settings(**change: object) -> dict:
        model = value["model"]
        return {"model": model | {"settings": model["settings"] | change}}

    for change, error, message in (
        ({"version": 9}, SchemaError, "version 9, this program reads 6"),
        ({"workflow_digest": "0" * 64}, SchemaError, "its workflow has been replaced"),
        (settings(over_arch_layer_sizes=[16, 1, 1]), BadInputError, r"module.top.*\.npy"),
        (settings(over_arch_layer_sizes=[8, 1]), BadInputError, r"\[16, \d+\] instead of \[8"),
        (settings(dense_arch_layer_sizes=[10**12, 8]), BadInputError, "damaged"),
        (settings(interaction_type="none"), BadInputError, "interaction_type 'none' is unknown"),
    ):
        BUNDLE_FORMAT.write(copy / "bundle.json", {**value, **change})
        with pytest.raises(error, match=message):
            Predictor.load(copy)
    write_json(copy / "bundle.json", value | {"generation": 7})
    with pytest.raises(BadInputError, match=r"bundle\.json: not what was written"):
        Predictor.load(copy)


def rewritten(
    source: Path,
    target: Path,
    *,
    dense: int = 13,
    another: int | None = None,
    **line: tuple,
) -> Path:
    """The same workflow with fewer dense columns, or with another value in cat_4's vocabulary."""
    description = inspect(source)
    vocabularies = {}
    for column in description.spec.categorical:
        vocabulary = description.vocabularies[column.name]
        values, counts = (c.to_numpy() for c in pq.read_table(source / vocabulary.file).columns)
        if another is not None and column.name == "cat_4":
            values, counts = np.append(values, another), np.append(counts, 1)
        vocabularies[column.name] = FittedVocabulary(values, counts, vocabulary.observed)
    spec = dataclasses.replace(description.spec, dense=description.spec.dense[:dense])
    state = Fitted(description.statistics, vocabularies)
    write_workflow(target, spec, state, **line)
    return target


def test_a_pair_that_does_not_belong_together(trained: Trained, tmp_path: Path) -> None:
    workflow = trained.workflow
    checkpoint = shutil.copytree(trained.checkpoint, tmp_path / "checkpoint")
    record = json.loads((checkpoint / "model.json").read_text())
    assert record["training"]["workflow_digest"] == inspect(workflow).digest

    def claim(digest: str | None) -> None:
        record["training"]["workflow_digest"] = digest
        write_json(checkpoint / "model.json", record | {"blake2b": FORMAT.digest(record)})

    claim("0" * 64)
    with pytest.raises(SchemaError, match=r"another workflow.*\n.*OUT/workflow next to"):
        Predictor.load(workflow, checkpoint)
    with pytest.raises(SchemaError, match="another workflow"):
        write_bundle(workflow, checkpoint, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    # without a recorded digest, columns and table sizes still have to fit
    claim(None)
    Predictor.load(rewritten(workflow, tmp_path / "same"), checkpoint)
    with pytest.raises(SchemaError, match=r"column cat_4: .* gives ids up to \d+"):
        Predictor.load(rewritten(workflow, tmp_path / "larger", another=2**32 - 1), checkpoint)
    with pytest.raises(SchemaError, match="has the columns"):
        Predictor.load(rewritten(workflow, tmp_path / "narrower", dense=12), checkpoint)
