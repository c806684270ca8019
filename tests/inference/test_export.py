"""Exports, each run by what it is for, beside the Predictor."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

from clicklog.spec import CategoricalColumn, DenseColumn, FeatureSpec
from inference import Predictor, write_bundle
from inference.__main__ import main
from inference.bundle import save_bundle
from inference.export.network import RawModel, to_inputs
from inference.export.probe import probe_rows
from inference.export.torch_package import export_torch
from inference.weights import ModelShape, from_scorer
from tests.inference.conftest import Trained
from tests.inference.reference import make_scorer
from tests.inference.test_predictor import criteo_dicts
from tests.workflows.random_specs import feature_specs
from tests.workflows.test_compiled import odd_rows, save
from workflows import compiled
from workflows.description import inspect


@pytest.fixture(scope="module")
def bundle(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "bundle"
    write_bundle(trained.workflow, trained.checkpoint, path)
    return path


def untrained(directory: Path, spec: FeatureSpec, seed: int) -> Predictor:
    """A bundle of a workflow with odd values and a model of random weights."""
    rng = np.random.default_rng(seed)
    statistics = {name: {"mean": 1.5, "std": 2.0} for name in spec.dense_names}
    save(directory / "workflow", spec, statistics, rng)
    workflow = compiled.load(directory / "workflow")
    scorer, config = make_scorer(workflow.schema, seed)
    shape = ModelShape(config.dense, config.categorical, config.num_embeddings, workflow.digest)
    model = from_scorer(scorer, config)
    save_bundle(directory / "bundle", directory / "workflow", model, shape)
    return Predictor(workflow, model)


def only_torch(directory: Path) -> Path:
    """A folder with PyTorch and what its metadata asks for, by links: a bare environment."""
    names, found = ["torch"], set()
    while names:
        name = names.pop()
        if name in found:
            continue
        found.add(name)
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
    assert not found & {"numpy", "pyarrow", "nvt-torchrec"}
    return directory


_BARE = """
import sys
sys.path.insert(0, {packages!r})
import torch
load = {{"model.pt2": lambda path: torch.export.load(path).module(),
        "compiled.pt2": torch._inductor.aoti_load_package}}
inputs = torch.load({folder!r} + "/inputs.pt")
for name in {names!r}:
    run = load[name]({export!r} + "/" + name)
    torch.save([run(*one) for one in inputs], {folder!r} + "/" + name + ".scores")
lost = [name for name in ("numpy", "inference", "pyarrow", "torchrec") if name in sys.modules]
print(lost)
"""


def run_bare(export: Path, folder: Path, inputs: list, names: list[str]) -> list:
    """Scores of each file of a package, from a process that has PyTorch and nothing else."""
    torch.save(inputs, folder / "inputs.pt")
    packages = folder / "packages"
    packages.mkdir()
    program = _BARE.format(
        packages=str(only_torch(packages)), export=str(export), folder=str(folder), names=names
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "ignore", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    return [torch.load(folder / f"{name}.scores") for name in names]


def test_a_package_runs_with_pytorch_alone(
    bundle: Path, trained: Trained, predictor: Predictor, tmp_path: Path, capsys
) -> None:
    export = tmp_path / "export"
    flags = ["--bundle", str(bundle), "--output", str(export), "--format", "torch"]
    assert main(["export", *flags]) == 0
    assert sorted(file.name for file in export.iterdir()) == ["columns.json", "model.pt2"]
    rows = criteo_dicts(trained.days[2]) + probe_rows(trained.workflow, 300, seed=9)
    columns = json.loads((export / "columns.json").read_text())
    assert columns["dense"]["columns"] == list(predictor.spec.dense_names)
    dense = torch.tensor(
        [[row[name] if row[name] is not None else np.nan for name in columns["dense"]["columns"]]
         for row in rows], dtype=torch.float64,
    )  # fmt: skip
    categorical = torch.tensor(
        [[int(row[name], 16) if isinstance(row[name], str) and row[name]
          else columns["categorical"]["missing"] if row[name] in (None, "") else row[name]
          for name in columns["categorical"]["columns"]] for row in rows]
    )  # fmt: skip
    inputs = [(dense, categorical, []), (dense[:1], categorical[:1], [])]
    [(got, first)] = run_bare(export, tmp_path, inputs, ["model.pt2"])
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
    small = dataclasses.replace(predictor.model, table=predictor.model.table.convert("int8"))
    sizes = predictor.workflow.schema.table_sizes
    names = LISTS.categorical_names
    shape = ModelShape(LISTS.dense_names, names, sizes, predictor.workflow.digest)
    save_bundle(tmp_path / "small", tmp_path / "workflow", small, shape)
    export_torch(tmp_path / "small", tmp_path / "export")
    small_predictor = Predictor(predictor.workflow, small)
    parts = [probe_rows(tmp_path / "workflow", count, seed=count) for count in (1, 2, 50)]
    inputs = [to_inputs(small_predictor.read(rows), LISTS) for rows in parts]
    assert [one[2][0].shape[1] for one in inputs][2] == 4
    [got] = run_bare(tmp_path / "export", tmp_path, inputs, ["model.pt2"])
    for scores, rows in zip(got, parts, strict=True):
        np.testing.assert_allclose(scores, small_predictor.predict(rows), atol=1e-6)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=feature_specs(), seed=st.integers(0, 2**31), count=st.integers(1, 20))
def test_the_network_scores_any_spec_as_the_predictor(
    spec: FeatureSpec, seed: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Before it is packed; strings become integers."""
    assume(spec.dense)
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
        got = network(*to_inputs(rows, spec)).numpy()
        expected = predictor.predict_rows(rows)
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "torch"], r"columns of strings, .*country.*\n.*Triton"),
        (["--format", "nvidia"], r"lists in column .*recent_products.*\n.*NVIDIA"),
        (["--format", "triton", "--compile"], "--compile with --format triton"),
        (["--format", "torch", "--train", "x"], "--train with --format torch"),
    ],
)
def test_what_cannot_be_exported(
    shop: Trained, tmp_path: Path, capsys, flags: list[str], message: str
) -> None:
    write_bundle(shop.workflow, shop.checkpoint, tmp_path / "bundle")
    given = ["--bundle", str(tmp_path / "bundle"), "--output", str(tmp_path / "export")]
    assert main(["export", *given, *flags]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [file.name for file in tmp_path.iterdir()] == ["bundle"]


def test_a_size_limit(bundle: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("inference.export.torch_package.LIMIT", 1000)
    flags = ["--bundle", str(bundle), "--output", str(tmp_path / "x"), "--format", "torch"]
    assert main(["export", *flags]) == 2
    assert "GiB of tables and vocabularies" in capsys.readouterr().err


def _model_config() -> type:
    """The parts of Triton's model_config.proto that are used; text does without its numbers."""
    field, file = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FileDescriptorProto()
    file.name, file.package, file.syntax = "config.proto", "t", "proto3"
    for name, values in (
        ("DataType", ["TYPE_INVALID", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING"]),
        ("Kind", ["KIND_AUTO", "KIND_GPU", "KIND_CPU"]),
    ):
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    text, number, many = field.TYPE_STRING, field.TYPE_INT64, field.LABEL_REPEATED
    tensor = [("name", text, ""), ("data_type", field.TYPE_ENUM, "DataType"), ("dims", number, "")]
    messages = {
        "Input": tensor,
        "Output": tensor,
        "Batching": [("max_queue_delay_microseconds", number, "")],
        "Group": [("kind", field.TYPE_ENUM, "Kind"), ("count", number, "")],
        "Config": [
            ("name", text, ""),
            ("backend", text, ""),
            ("max_batch_size", number, ""),
            ("input", field.TYPE_MESSAGE, "Input"),
            ("output", field.TYPE_MESSAGE, "Output"),
            ("dynamic_batching", field.TYPE_MESSAGE, "Batching"),
            ("instance_group", field.TYPE_MESSAGE, "Group"),
        ],
    }
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for index, (key, kind, of) in enumerate(fields, 1):
            made = message.field.add(name=key, number=index, type=kind, label=field.LABEL_OPTIONAL)
            if of:
                made.type_name = f".t.{of}"
            if key in ("dims", "input", "output", "instance_group"):
                made.label = many
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Config"))


_TRITON = """
import json, pathlib, sys
import numpy as np
import triton_python_backend_utils as pb
model_directory, folder = map(pathlib.Path, sys.argv[1:])
import importlib.util
spec = importlib.util.spec_from_file_location("model", model_directory / "model.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
model = module.TritonPythonModel()
model.initialize({"model_instance_kind": "CPU", "model_instance_device_id": "0"})
kinds = {"TYPE_FP64": np.float64, "TYPE_STRING": object}
requests = []
for request in json.loads((folder / "requests.json").read_text()):
    tensors = []
    for name, kind, values in request:
        if kind == "TYPE_STRING":
            values = [value.encode() for value in values]
        tensors.append(pb.Tensor(name, np.array(values, kinds[kind]).reshape(-1, 1)))
    requests.append(pb.InferenceRequest(tensors))
answers = []
for response in model.execute(requests):
    if response.has_error():
        answers.append(response.error().message())
        continue
    (tensor,) = response.output_tensors()
    assert tensor.name() == "probability" and tensor.as_numpy().dtype == np.float32
    assert tensor.as_numpy().shape[1:] == (1,)
    answers.append(tensor.as_numpy()[:, 0].tolist())
import inference
bad = [name for name in ("nvtabular", "dask", "pandas", "torchrec", "dlrm") if name in sys.modules]
print(json.dumps([answers, inference.__file__, bad]))
model.finalize()
"""


def test_a_triton_repository(shop: Trained, shop_predictor: Predictor, tmp_path: Path) -> None:
    """Strings, lists, prices; bad rows harm nobody else."""
    write_bundle(shop.workflow, shop.checkpoint, tmp_path / "bundle")
    flags = ["--bundle", str(tmp_path / "bundle"), "--output", str(tmp_path / "made")]
    assert main(["export", *flags, "--format", "triton"]) == 0
    repository = (tmp_path / "made").rename(tmp_path / "moved")
    [model] = repository.iterdir()
    config = text_format.Parse((model / "config.pbtxt").read_text(), _model_config()())
    assert (config.name, config.backend) == (model.name, "python")
    [output] = config.output
    assert (output.name, list(output.dims)) == ("probability", [1])
    kinds = config.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_number
    pins = dict(line.split("==") for line in (model / "1/requirements.txt").read_text().split())
    assert pins["torch"] == torch.__version__.partition("+")[0]

    def tensors(rows: list[dict]) -> list:
        result = []
        for one in config.input:
            assert list(one.dims) == [1]
            kind = kinds[one.data_type].name
            values = [row[one.name] for row in rows]
            if kind == "TYPE_FP64":
                values = [float("nan") if value is None else value for value in values]
            else:
                values = [
                    json.dumps(value) if isinstance(value, list) else value or ""
                    for value in values
                ]
            result.append((one.name, kind, values))
        return result

    rows = probe_rows(shop.workflow, 60)
    parts = [rows[:1], rows[1:20], rows[20:]]
    bad = [rows[0] | {"country": "x", "recent_products": [[1]]}]
    requests = [tensors(part) for part in (parts[0], bad, *parts[1:])]
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    done = subprocess.run(
        [sys.executable, "-c", _TRITON, str(model / "1"), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (first, error, *others), where, imported = json.loads(done.stdout.splitlines()[-1])
    assert where.startswith(str(model))
    assert imported == []
    assert "row 0, column recent_products" in error
    got = np.concatenate([first, *others])
    np.testing.assert_allclose(got, shop_predictor.predict(rows), atol=1e-6)


def test_rows_as_nvidias_dlrm_reads_them(
    bundle: Path, trained: Trained, predictor: Predictor, tmp_path: Path, capsys
) -> None:
    """Read the way its feature_spec.py and its dataset for split binaries do."""
    output = tmp_path / "nvidia"
    flags = ["--bundle", str(bundle), "--output", str(output), "--format", "nvidia"]
    assert main(["export", *flags, "--test", str(trained.raw / "day_2")]) == 0
    assert "test: 201 rows" in capsys.readouterr().out
    spec = yaml.safe_load((output / "feature_spec.yaml").read_text())
    assert set(spec) == {"feature_spec", "source_spec", "channel_spec", "metadata"}
    features, channels = spec["feature_spec"], spec["channel_spec"]
    assert set(channels) == {"categorical", "numerical", "label"}
    assert sorted(name for channel in channels.values() for name in channel) == sorted(features)
    [label_name] = channels["label"]
    sizes = [features[name]["cardinality"] for name in channels["categorical"]]
    assert sizes == list(predictor.workflow.schema.table_sizes)
    assert sorted(spec["source_spec"]) == ["test", "train"]
    read = {}
    for mapping, chunks in spec["source_spec"].items():
        seen = []
        for chunk in chunks:
            assert chunk["type"] == "split_binary"
            [file] = chunk["files"]
            names = chunk["features"]
            seen += names
            assert names == channels["numerical"] or len(names) == 1
            [kind] = {features[name]["dtype"] for name in names}
            if mapping == "test":
                read[names[0]] = np.fromfile(output / file, kind).reshape(-1, len(names))
            else:
                assert (output / file).parent.is_dir()
        assert sorted(seen) == sorted(features)
    for name, size in zip(channels["categorical"], sizes, strict=True):
        smallest = next(k for k in ("int8", "int16", "int32") if size < np.iinfo(k).max)
        assert features[name]["dtype"] == smallest
        assert read[name].min() >= 0
        assert read[name].max() < size
    assert features[label_name]["dtype"] == "bool"
    assert {features[name]["dtype"] for name in channels["numerical"]} == {"float16"}
    labels = [row[0] == "1" for row in trained.days[2]]
    assert read[label_name][:, 0].tolist() == labels
    ids = np.concatenate([read[name] for name in channels["categorical"]], 1).T
    dense = read[channels["numerical"][0]].T.astype(np.float32)
    got = predictor.predict_encoded(dense, ids.astype(np.int32))
    expected = predictor.predict(criteo_dicts(trained.days[2]))
    np.testing.assert_allclose(got, expected, atol=2e-3)  # float16
