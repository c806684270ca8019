"""Exports, each run by what it is for, beside the Predictor."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from nvt_torchrec.formats.feature_spec.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
)
from nvt_torchrec.formats.feature_spec.reading import Derivation, Reading
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.export.torch_package import MISSING, RawModel, describe, export_torch
from nvt_torchrec.inference.model.bundle import describe as describe_bundle
from nvt_torchrec.inference.model.bundle import save_bundle, write_bundle
from nvt_torchrec.inference.model.weights import ModelShape, from_scorer
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.description import inspect
from tests.inference.bundles import make_bundle, make_origin, with_full_disk
from tests.inference.conftest import Trained
from tests.inference.exported import arguments_of
from tests.inference.reference import make_scorer
from tests.inference.test_predictor import criteo_dicts
from tests.workflows.random_specs import examples, feature_specs
from tests.workflows.test_compiled import odd_rows, save


def random_bundle(workflow: Path, path: Path, seed: int) -> Predictor:
    """Write a bundle of a saved workflow and a model of random weights; return its predictor."""
    opened = compiled.load(workflow)
    scorer, config = make_scorer(opened.schema, seed)
    shape = ModelShape(config, opened.digest)
    model = from_scorer(scorer, config)
    save_bundle(path, workflow, model, shape, origin=make_origin(0, (0,)))
    return Predictor(opened, model)


def untrained(directory: Path, spec: FeatureSpec, seed: int) -> Predictor:
    """A bundle of a workflow with odd values and a model of random weights."""
    save(directory / "workflow", spec, np.random.default_rng(seed))
    return random_bundle(directory / "workflow", directory / "bundle", seed)


def linked(directory: Path, *wanted: str) -> set[str]:
    """Link packages, and what their metadata asks for, into a folder; return their names."""
    names, linked_names = list(wanted), set()
    while names:
        name = names.pop()
        if name in linked_names:
            continue
        linked_names.add(name)
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            top = Path(file).parts[0]
            target = Path(distribution.locate_file(top))
            if top not in ("..", "__pycache__") and not (directory / top).exists():
                (directory / top).symlink_to(target)
        for line in distribution.requires or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                names.append(need.name)
    return linked_names


_BARE = """
import sys
sys.path.insert(0, {packages!r})
import torch
run = torch.export.load({export!r} + "/model.pt2").module()
inputs = torch.load({folder!r} + "/inputs.pt")
torch.save([run(*arguments) for arguments in inputs], {folder!r} + "/scores")
lost = [name for name in ("numpy", "nvt_torchrec", "pyarrow", "torchrec") if name in sys.modules]
print(lost)
"""


def run_isolated(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds no packages but those in ``sys.path`` by its own doing."""
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", program]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def run_bare(export: Path, folder: Path, inputs: list) -> list:
    """Scores of a package, from a process that has PyTorch and nothing else."""
    torch.save(inputs, folder / "inputs.pt")
    packages = folder / "packages"
    packages.mkdir()
    assert not linked(packages, "torch") & {"numpy", "pyarrow", "nvt-torchrec"}
    program = _BARE.format(packages=str(packages), export=str(export), folder=str(folder))
    done = run_isolated(program, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    return torch.load(folder / "scores")


def test_a_package_runs_with_pytorch_alone(
    bundle: Path, trained: Trained, predictor: Predictor, tmp_path: Path, capsys
) -> None:
    export = tmp_path / "export"
    flags = ["--bundle", str(bundle), "--output", str(export), "--format", "torch"]
    assert main(["export", *flags]) == 0
    assert sorted(file.name for file in export.iterdir()) == ["columns.json", "model.pt2"]
    rows = criteo_dicts(trained.days[2])
    columns = json.loads((export / "columns.json").read_text())
    assert columns["dense"]["columns"] == list(predictor.spec.dense_names)
    assert columns["categorical"]["columns"] == list(predictor.spec.categorical_names)
    assert columns["categorical"]["missing"] == MISSING
    dense, categorical, _ = arguments_of(predictor.read(rows), predictor.spec)
    inputs = [(dense, categorical, []), (dense[:1], categorical[:1], [])]
    got, first = run_bare(export, tmp_path, inputs)
    expected = predictor.predict(rows)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    np.testing.assert_allclose(first, expected[:1], atol=1e-6)
    assert np.ptp(expected) > 0.1
    assert main(["export", *flags]) == 2
    assert "exists" in capsys.readouterr().err


LISTS = FeatureSpec(
    "label",
    (DenseColumn("d0", fill=3), DenseColumn("d1", raw="float")),
    (
        CategoricalColumn("c0", raw="int", multi_hot=True, vocabulary="v"),
        CategoricalColumn("c1", raw="hex32", max_table_size=9, num_buckets=3),
        CategoricalColumn("c2", raw="int", vocabulary="v"),
        CategoricalColumn("c3", raw="int", hash_buckets=5, multi_hot=True),
    ),
)


def test_a_package_of_lists_hashes_and_small_tables(tmp_path: Path) -> None:
    predictor = untrained(tmp_path, LISTS, 4)
    small, shape = predictor.model.convert("int8"), describe_bundle(tmp_path / "bundle").model
    save_bundle(
        tmp_path / "small", tmp_path / "workflow", small, shape, origin=make_origin(0, (0,))
    )
    export_torch(tmp_path / "small", tmp_path / "export")
    small_predictor = Predictor(predictor.workflow, small)
    parts = [odd_rows(LISTS, count, np.random.default_rng(count)) for count in (1, 2, 50)]
    inputs = [arguments_of(rows, LISTS) for rows in parts]
    assert max(values.shape[1] for _, _, lists in inputs for values in lists) > 1
    got = run_bare(tmp_path / "export", tmp_path, inputs)
    for scores, rows in zip(got, parts, strict=True):
        np.testing.assert_allclose(scores, small_predictor.predict_rows(rows), atol=1e-6)


@examples(25)
@given(spec=feature_specs(), seed=st.integers(0, 2**31), count=st.integers(1, 20))
def test_the_network_scores_any_spec_as_the_predictor(
    spec: FeatureSpec, seed: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Before it is packed; strings become integers."""
    categorical = tuple(
        dataclasses.replace(column, raw="int") if column.raw == "string" else column
        for column in spec.categorical
    )
    spec = dataclasses.replace(spec, categorical=categorical)
    directory = tmp_path_factory.mktemp("any")
    predictor = untrained(directory, spec, seed)
    workflow = directory / "workflow"
    network = RawModel(inspect(workflow), workflow, predictor.model)
    rows = odd_rows(spec, count, np.random.default_rng(seed))
    with torch.no_grad(), np.errstate(over="ignore", invalid="ignore"):
        got = network(*arguments_of(rows, spec)).numpy()
        expected = predictor.predict_rows(rows)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_the_columns_say_what_the_caller_derives() -> None:
    hour = Reading(("time",), nulls=("-",))
    spec = FeatureSpec(
        "label",
        (DenseColumn("d0"),),
        (
            CategoricalColumn("tags", raw="int", multi_hot=True),
            CategoricalColumn("hour", raw="int", reading=hour, derive=Derivation("hour")),
        ),
    )
    columns = describe(spec, "digest")
    assert columns["categorical"]["columns"] == ["hour"]
    assert columns["lists"]["columns"] == ["tags"]
    assert columns["derived"] == {"hour": {"from": ["time"], "kind": "hour"}}
    assert columns["nulls"] == {"hour": ["-"]}


def test_text_cannot_be_exported(shop: Trained, tmp_path: Path, capsys) -> None:
    write_bundle(shop.workflow, shop.checkpoint, tmp_path / "bundle")
    given = ["--bundle", str(tmp_path / "bundle"), "--output", str(tmp_path / "export")]
    assert main(["export", *given, "--format", "torch"]) == 2
    assert re.search(r"columns of strings, .*country.*\n.*Triton", capsys.readouterr().err)
    assert [file.name for file in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_a_full_disk_is_a_sentence(tmp_path: Path, kind: str) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    before = sorted(tmp_path.iterdir())
    flags = ["--bundle", bundle, "--format", kind, "--output", tmp_path / "export"]
    done = with_full_disk(100, "export", *flags)
    assert done.returncode == 2
    *_, error, remedy = done.stderr.splitlines()
    assert error.startswith(f"error: {tmp_path / 'export'}: cannot be written: ")
    assert "File too large" in error
    assert len(error) < 400
    assert remedy == "  -> free space, or choose a writable place"
    assert sorted(tmp_path.iterdir()) == before
