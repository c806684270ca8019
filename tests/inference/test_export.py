"""Exports, each run by what it is for, beside the Predictor."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from benchmarks.inference import read_first_rows
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import (
    DERIVATIONS,
    Bucket,
    Derivation,
    DerivedValue,
)
from nvt_torchrec.formats.feature_spec.read_plan import Reading
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.export import onnx_file
from nvt_torchrec.inference.export.graph import encode
from nvt_torchrec.inference.export.onnx_file import assemble_model, export_onnx
from nvt_torchrec.inference.export.onnx_operators import Graph
from nvt_torchrec.inference.export.onnx_scores import Scores
from nvt_torchrec.inference.model.bundle import save_bundle, write_bundle
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.vocabulary import fit_vocabulary
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.inference.bundles import make_origin
from tests.inference.conftest import Trained
from tests.inference.exported import score, tensors_of
from tests.inference.reference import make_scorer, to_serve
from tests.inference.test_predictor import criteo_dicts
from tests.shell import ROOT
from tests.workflows.random_specs import as_columns, examples, feature_specs
from tests.workflows.test_compiled import odd_rows, save


def random_bundle(workflow: Path, path: Path, seed: int) -> Predictor:
    """Write a bundle of a saved workflow and a model of random weights; return its predictor."""
    opened = compiled.load(workflow)
    scorer, config = make_scorer(opened.schema, seed)
    model = to_serve(scorer, config)
    save_bundle(path, workflow, model, make_origin(0, (0,)))
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


def run_isolated(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds no packages but those in ``sys.path`` by its own doing."""
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", program]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


_BARE = """
import sys
sys.path.insert(0, {packages!r})
import numpy, onnxruntime
session = onnxruntime.InferenceSession({export!r} + "/model.onnx")
with numpy.load({folder!r} + "/inputs.npz", allow_pickle=True) as inputs:
    (scores,) = session.run(["probability"], dict(inputs))
numpy.save({folder!r} + "/scores.npy", scores)
print([name for name in ("torch", "nvt_torchrec", "pyarrow", "onnx") if name in sys.modules])
"""


def test_a_file_that_scores_otherwise_is_not_written(
    bundle: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Scores.forward
    monkeypatch.setattr(
        Scores, "forward", lambda self, columns: (original(self, columns)[0] * 0.99,)
    )
    flags = ["--bundle", str(bundle), "--output", str(tmp_path / "export")]
    assert main(["export", *flags]) == 2
    assert "model.onnx: its probabilities differ from the bundle's by" in capsys.readouterr().err
    assert not (tmp_path / "export").exists()


def test_a_file_runs_with_onnx_runtime_alone(
    bundle: Path, trained: Trained, predictor: Predictor, tmp_path: Path, capsys
) -> None:
    export = tmp_path / "export"
    flags = ["--bundle", str(bundle), "--output", str(export)]
    assert main(["export", *flags]) == 0
    assert [file.name for file in export.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(export / "model.onnx", full_check=True)
    rows = criteo_dicts(trained.days[2])
    tensors = to_tensors(list_inputs(predictor.spec), rows)
    assert {name: str(values.dtype) for name, values in tensors.items()} == {
        name: "int64" if name.startswith("int") else "object"
        for name in predictor.spec.feature_names
    }
    np.savez(tmp_path / "inputs.npz", **tensors)
    packages = tmp_path / "packages"
    packages.mkdir()
    assert not linked(packages, "onnxruntime") & {"torch", "pyarrow", "nvt-torchrec", "onnx"}
    program = _BARE.format(packages=str(packages), export=str(export), folder=str(tmp_path))
    done = run_isolated(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    expected = predictor.predict(rows)
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected, atol=1e-6)
    first = {name: values[:1] for name, values in tensors.items()}
    np.testing.assert_allclose(score(export, first), expected[:1], atol=1e-6)
    assert np.ptp(expected) > 0.1
    for digits in ("68FD1E64", "068fd1e64", "x"):
        with pytest.raises(Exception, match="hexadecimal digits must be lower case, and 8 or"):
            score(export, first | {"cat_3": np.array([digits], object)})
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


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_lists_hashes_and_small_tables(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "_MIN_SEPARATE_WEIGHT_BYTES", 1)
    predictor = untrained(tmp_path, LISTS, 4)
    small = predictor.model.convert(kind)
    save_bundle(tmp_path / "small", tmp_path / "workflow", small, make_origin(0, (0,)))
    export_onnx(tmp_path / "small", tmp_path / "export")
    assert (tmp_path / "export" / "model.onnx.data").is_file()
    (tmp_path / "export").rename(tmp_path / "moved")
    small_predictor = Predictor(predictor.workflow, small)
    for count in (1, 2, 50):
        rows = odd_rows(LISTS, count, np.random.default_rng(count))
        scores = score(tmp_path / "moved", tensors_of(rows, LISTS))
        np.testing.assert_allclose(scores, small_predictor.predict_rows(rows)[:, 0], atol=1e-6)


@examples(25)
@given(spec=feature_specs(), seed=st.integers(0, 2**31), count=st.integers(1, 20))
def test_any_spec_scores_as_the_predictor(
    spec: FeatureSpec, seed: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """ONNX Runtime encodes, and the module that is exported scores; strings are not hashed."""
    categorical = tuple(
        dataclasses.replace(c, num_buckets=0, hash_buckets=0) if c.raw == "string" else c
        for c in spec.categorical
    )
    spec = dataclasses.replace(spec, categorical=categorical)
    directory = tmp_path_factory.mktemp("any")
    predictor = untrained(directory, spec, seed)
    description, graph = inspect(directory / "workflow"), Graph()
    encoded = encode(graph, description, directory / "workflow", description.spec)
    outputs = [graph.Identity(value) for value in encoded.columns]
    for value in outputs:
        value.dtype = ir.DataType.INT64
    if spec.dense:
        outputs[0].dtype = ir.DataType.DOUBLE
    outputs = {str(k): value for k, value in enumerate(outputs)}
    model = assemble_model(encoded.inputs, outputs, [*graph.nodes], [*graph.initializers])
    ir.save(model, directory / "model.onnx")
    rows = odd_rows(spec, count, np.random.default_rng(seed))
    session = onnxruntime.InferenceSession(directory / "model.onnx")
    columns = session.run(None, tensors_of(rows, spec))
    encoded_rows = predictor.workflow.transform(rows)
    ids = encoded_rows.ids
    single = [j for j, column in enumerate(spec.categorical) if not column.multi_hot]
    if single:
        np.testing.assert_array_equal(columns[bool(spec.dense)].T, [ids.column(j) for j in single])
    with torch.no_grad(), np.errstate(over="ignore", invalid="ignore"):
        (got,) = Scores(description, predictor)([*map(torch.from_numpy, columns)])
        expected = predictor.predict_encoded(encoded_rows.dense, ids)
    np.testing.assert_allclose(got, expected[:, 0], atol=1e-6)


def column(name: str, source: str | tuple, how: str = "", nulls: tuple = (), **more) -> dict:
    """The arguments of a column that is read or derived from others."""
    rule = {k: more.pop(k) for k in ("time_format", "reference", "boundaries") if k in more}
    sources = (source,) if isinstance(source, str) else source
    derive = Derivation(how, **rule) if how else None
    return {"name": name, "reading": Reading(sources, nulls), "derive": derive, **more}


SECONDS, MILLIS = {"time_format": "epoch_s"}, {"time_format": "epoch_ms"}
DERIVED = FeatureSpec(
    "label",
    (
        DenseColumn(**column("old", "seen", "age", raw="float", reference="2026-01-01", **SECONDS)),
        DenseColumn(**column("span", ("at", "born"), "age", raw="float", **MILLIS)),
        DenseColumn(**column("cost", "price", nulls=("-1",), raw="float")),
        DenseColumn(**column("count", "n", nulls=("-1", "none"))),
    ),
    (
        *(
            CategoricalColumn(**column(part, "seen", part, raw="int", **SECONDS))
            for part in ("hour", "weekday")
        ),
        CategoricalColumn(**column("step", "price", "bucket", raw="int", boundaries=(1.0, 2.5))),
        CategoricalColumn(**column("square", "n", "log_square", raw="int")),
        CategoricalColumn(**column("pair", ("a", "b"), "cross", raw="string")),
        CategoricalColumn(**column("shop", "a", nulls=("-", "none"), raw="string")),
        CategoricalColumn(**column("flag", "flag", raw="bool", max_table_size=9, num_buckets=3)),
        CategoricalColumn(**column("kind", "kind", nulls=("0",), raw="int")),
    ),
)  # fmt: skip


def test_derived_columns_and_nulls(tmp_path: Path) -> None:
    """Of times before and after 1970, in leap years and others."""
    rng = np.random.default_rng(3)

    def draw(*values: Any) -> list:
        return [values[k] for k in rng.integers(len(values), size=400)]

    seconds = [*rng.integers(-(10**10), 10**10, 300).tolist(), -1, 0, 951782400, None]
    columns = {
        "seen": draw(*seconds), "at": draw(0, 10**12, None), "born": draw(-1, 10**11, None),
        "price": draw(-1.0, 0.5, 1.0, 2.5, 9.0, None), "n": draw(-1, 0, 1, 2, 3, 70, 1000, None),
        "a": draw("x", "é", "-", "none", "", None), "b": draw("x", "y", None),
        "flag": draw("TRUE", "no", "1", "F", "", None), "kind": draw(0, 1, 2, None),
    }  # fmt: skip
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    known = {name: np.arange(13) for name in ("hour", "weekday", "step", "square")}
    known |= {"pair": ["x\x1fx", "é\x1fy"], "shop": ["x", "é"], "flag": np.array([1])}
    vocabularies = {
        c.name: fit_vocabulary(
            *as_columns(dict.fromkeys(known.get(c.name, np.arange(3)), 1), c.raw), c, 0
        )
        for c in DERIVED.categorical
    }
    statistics = {name: {"mean": 1.5, "std": 2.0} for name in DERIVED.dense_names}
    fitted = Fitted(statistics, vocabularies)
    write_workflow(tmp_path / "workflow", DERIVED, fitted)
    predictor = random_bundle(tmp_path / "workflow", tmp_path / "bundle", 1)
    export_onnx(tmp_path / "bundle", tmp_path / "export")
    scores = score(tmp_path / "export", to_tensors(list_inputs(DERIVED), rows))
    np.testing.assert_allclose(scores, predictor.predict(rows), atol=1e-6)
    assert len(np.unique(scores)) > 300


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        ({"raw": "string", "hash_buckets": 9}, "c: strings are hashed"),
        ({"raw": "string", "reading": Reading(trim=True)}, "c: spaces around strings"),
        (column("c", "t", "hour", raw="int", time_format="%Y%m%d"), "t: times are strings"),
        (column("c", "d", raw="string"), "d: read both as strings and as numbers"),
        ({"derive": "own", "raw": "int"}, "c: derived by a class that has no ONNX form"),
    ],
)
def test_what_onnx_cannot_encode(
    columns: dict, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    if columns.get("derive") == "own":
        own = type("Own", (Bucket,), {"compute_onnx": DerivedValue.compute_onnx})
        monkeypatch.setitem(DERIVATIONS, "own", own())
        columns = {**columns, "derive": Derivation("own", boundaries=(1,))}
    category = CategoricalColumn(**{"name": "c", **columns})
    untrained(tmp_path, FeatureSpec("label", (DenseColumn("d"),), (category,)), 1)
    given = ["--bundle", str(tmp_path / "bundle"), "--output", str(tmp_path / "export")]
    assert main(["export", *given]) == 2
    printed = capsys.readouterr().err
    assert f"columns that ONNX's operators cannot encode: {wrong}" in printed
    assert "-> serve the bundle" in printed
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bundle", "workflow"]


def test_a_triton_repository(shop: Trained, shop_predictor: Predictor, tmp_path: Path) -> None:
    """Its configuration is that of the file, with Triton's batch dimension left out."""
    write_bundle(shop.workflow, shop.checkpoint, tmp_path / "bundle")
    flags = ["--bundle", str(tmp_path / "bundle"), "--output", str(tmp_path / "made")]
    assert main(["export", *flags, "--format", "triton"]) == 0
    [model] = (tmp_path / "made").iterdir()
    config = (model / "config.pbtxt").read_text()
    assert 'backend: "onnxruntime"' in config
    found = re.findall(
        r'name: "(.+)", data_type: TYPE_(\w+), dims: \[ (-?1) \](, reshape)?', config
    )
    session = onnxruntime.InferenceSession(model / "1" / "model.onnx")
    kinds = {"STRING": "string", "INT64": "int64", "FP64": "double", "FP32": "float"}
    assert [(name, f"tensor({kinds[kind]})") for name, kind, *_ in found] == [
        (value.name, value.type) for value in (*session.get_inputs(), *session.get_outputs())
    ]
    ranks = [len(value.shape) for value in session.get_inputs()]
    assert [(dims, bool(reshape)) for *_, dims, reshape in found[:-1]] == [
        ("1", True) if rank == 1 else ("-1", False) for rank in ranks
    ]
    rows = read_first_rows(str(sorted(shop.raw.iterdir())[-1]), shop_predictor.spec, 60)
    scores = score(model / "1", to_tensors(list_inputs(shop_predictor.spec), rows))
    np.testing.assert_allclose(scores, shop_predictor.predict(rows), atol=1e-6)
    # docs/onnx.md's row of missing values, of any columns: lists, their lengths and floats, too
    page = (ROOT / "docs" / "onnx.md").read_text()
    snippet = re.search(r"```python\n(.*?)row\[\"int_0\"\]", page, re.DOTALL)[1]
    names: dict = {}
    exec(snippet.replace("DIR/model.onnx", str(model / "1" / "model.onnx")), names)
    (got,) = names["session"].run(["probability"], names["row"])
    row = dict.fromkeys(shop_predictor.spec.sources(label=False))
    np.testing.assert_allclose(got, shop_predictor.predict([row]), atol=1e-6)
