"""Bundles of own models, whose heads are files of ONNX, perhaps of a stranger."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from nvt_torchrec.base.errors import BadInputError, ClickLogError
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.model import reference
from nvt_torchrec.inference.model.bundle import FORMAT
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.publish import trial
from nvt_torchrec.models.onnx_head import OPSET
from tests.inference.bundles import ROWS, make_bundle
from tests.inference.serving import serving
from tests.shell import python

HEAD = "weights/head.onnx"
DENSE = helper.make_tensor_value_info("dense", TensorProto.FLOAT, ["rows", 2])
VECTORS = helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["rows", "features", "width"])
LOGITS = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", 1])


def constant(name: str, values: list, kind: int = TensorProto.INT64) -> onnx.TensorProto:
    return helper.make_tensor(name, kind, [len(values)], values)


def make_model(nodes: list[onnx.NodeProto], *initializers, domain: str = "") -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "head", [DENSE, VECTORS], [LOGITS], [*initializers])
    opsets = [helper.make_opsetid("", OPSET)]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def usual() -> onnx.ModelProto:
    """The sum of the dense values."""
    axis = constant("axis", [1])
    return make_model([helper.make_node("ReduceSum", ["dense", "axis"], ["logits"])], axis)


def put_head(bundle: Path, content: bytes, *, rescore: bool = False) -> None:
    """Put a file of ONNX into a bundle, as somebody would who signs what they send."""
    (bundle / HEAD).write_bytes(content)
    value = read_json(bundle / "bundle.json", "a bundle")
    own = {"id_columns": [], "length_columns": [], "widest": 1, "digest": ""}
    value["model"] |= {"model": "theirs:build", "settings": {}, "own": own}
    value["files"] = {
        name: entry
        for name, entry in value["files"].items()
        if not name.startswith("weights/") or name in ("weights/table.npy", HEAD)
    }
    changed = [HEAD]
    if rescore:
        value["files"][HEAD] = FileEntry.from_file(bundle / HEAD).to_dict()
        FORMAT.write(bundle / "bundle.json", value)
        rescore_reference(bundle)
        changed.append("reference/scores.npy")
    for name in changed:
        value["files"][name] = FileEntry.from_file(bundle / name).to_dict()
    FORMAT.write(bundle / "bundle.json", value)


def rescore_reference(bundle: Path) -> None:
    """Give the reference rows the scores of the model that is there."""
    predictor = Predictor.load(bundle)
    rows = reference.make_rows(bundle / "workflow", predictor.workflow.schema, predictor.model)
    np.save(bundle / "reference" / "scores.npy", rows["scores"])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("original") / "bundle")


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "bundle")


def test_a_head_of_onnx_is_scored_and_published(bundle: Path, tmp_path: Path) -> None:
    put_head(bundle, usual().SerializeToString(), rescore=True)
    predictor = Predictor.load(bundle, check=True)
    encoded = predictor.workflow.transform(predictor.read(ROWS))
    expected = 1 / (1 + np.exp(-encoded.dense.sum(0)))
    np.testing.assert_allclose(predictor.predict(ROWS), expected, atol=1e-6)
    assert main(["publish", str(bundle), "--to", str(tmp_path / "served")]) == 0


def with_external_data() -> onnx.ModelProto:
    model = usual()
    tensor = model.graph.initializer[0]
    tensor.ClearField("int64_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    return model


def with_loop() -> onnx.ModelProto:
    """A loop without end."""
    condition = helper.make_tensor_value_info("go", TensorProto.BOOL, [])
    number = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    after = helper.make_tensor_value_info("on", TensorProto.BOOL, [])
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"])], "body", [number, condition], [after]
    )
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    loop = helper.make_node("Loop", ["", "yes"], [], body=body)
    return make_model([loop, *usual().graph.node], yes, constant("axis", [1]))


def with_function() -> onnx.ModelProto:
    model = usual()
    node = helper.make_node("Identity", ["x"], ["y"])
    opsets = [helper.make_opsetid("", OPSET)]
    model.functions.append(helper.make_function("theirs", "F", ["x"], ["y"], [node], opsets))
    return model


def with_foreign_operator() -> onnx.ModelProto:
    node = helper.make_node("Gelu", ["dense"], ["logits"], domain="com.microsoft")
    return make_model([node], domain="com.microsoft")


def with_another_output() -> onnx.ModelProto:
    model = usual()
    model.graph.output[0].name = model.graph.node[0].output[0] = "others"
    return model


@pytest.mark.usefixtures("warm_trials")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_external_data, "whose data are in another file"),
        (with_loop, "'Loop', which is a branch or a loop"),
        (with_function, "the definition of a function"),
        (with_foreign_operator, "operators of 'com.microsoft'"),
        (lambda: divide(-1), "Div of integers by 0 or -1"),
        (lambda: divide(None), "Div of integers by a value that is not a constant"),
        (with_another_output, "not logits"),
    ],
)
def test_files_that_no_command_opens(
    make: Callable[[], onnx.ModelProto], message: str, bundle: Path, tmp_path: Path, capsys
) -> None:
    put_head(bundle, make().SerializeToString())
    rows = tmp_path / "rows.tsv"
    rows.write_text("1\t\t7\t5\n")
    for command in (
        ["predict", "--bundle", bundle, "--input", rows, "--output", tmp_path / "x.parquet"],
        ["publish", bundle, "--to", tmp_path / "served"],
        ["export", "--bundle", bundle, "--output", tmp_path / "onnx"],
        ["serve", "--bundle", bundle],
    ):
        assert main([str(part) for part in command]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
    assert not (tmp_path / "served" / "current").exists()


def test_bytes_that_are_no_model(bundle: Path) -> None:
    whole = usual().SerializeToString()
    for content in (b"", b"\xff" * 100, whole[: len(whole) // 2]):
        put_head(bundle, content)
        with pytest.raises(ClickLogError, match="damaged"):
            Predictor.load(bundle, check=True)


def expand(size: int) -> onnx.ModelProto:
    """More numbers than fit into memory."""
    return make_model(
        [
            helper.make_node("ReduceSum", ["dense"], ["sum"], keepdims=0),
            helper.make_node("Expand", ["sum", "size"], ["large"]),
            helper.make_node("ReduceSum", ["large"], ["one"], keepdims=1),
            helper.make_node("ReduceSum", ["dense", "axis"], ["sums"]),
            helper.make_node("Add", ["sums", "one"], ["logits"]),
        ],
        constant("size", [size]),
        constant("axis", [1]),
    )


def divide(divisor: int | None) -> onnx.ModelProto:
    """Divide the smallest integer, perhaps by a value that depends on the rows."""
    nodes = [
        helper.make_node("ReduceSum", ["dense", "axis"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["depends"], to=TensorProto.INT64),
        helper.make_node("Div", ["least", "depends" if divisor is None else "by"], ["quotient"]),
        helper.make_node("Cast", ["quotient"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["sums", "number"], ["logits"]),
    ]
    constants = constant("least", [-(2**63)]), constant("by", [divisor or 1]), constant("axis", [1])
    return make_model(nodes, *constants)


@pytest.mark.usefixtures("warm_trials")
@pytest.mark.parametrize(
    "make", [lambda: expand(10**12), lambda: expand(2 * 10**9)], ids=["10^12", "8 GB"]
)
def test_what_takes_too_much_is_not_served(
    make: Callable[[], onnx.ModelProto], bundle: Path, tmp_path: Path
) -> None:
    """It is tried in a process of its own, which may end by a signal."""
    put_head(bundle, make().SerializeToString())
    with pytest.raises(BadInputError) as raised:
        trial.try_bundle(bundle)
    assert raised.value.remedy
    done = python("-m", "nvt_torchrec.inference", "publish", bundle, "--to", tmp_path / "served")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "served" / "current").exists()


def test_a_trial_that_takes_too_long(bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr(trial, "_CPU_S", 1)  # importing PyTorch takes longer
    with pytest.raises(BadInputError, match="takes too long"):
        trial.try_bundle(bundle)


def test_a_bundle_that_answers_otherwise_is_refused(bundle: Path, tmp_path: Path, capsys) -> None:
    put_head(bundle, usual().SerializeToString())  # the scores are those of the original
    assert main(["publish", str(bundle), "--to", str(tmp_path / "served")]) == 2
    assert "the scores of its reference rows differ" in capsys.readouterr().err


def test_a_row_that_the_model_cannot_compute(bundle: Path, tmp_path: Path) -> None:
    """It is an error of that request; the server goes on."""
    model = make_model(
        [
            helper.make_node("ReduceMax", ["dense"], ["most"], keepdims=0),
            helper.make_node("Greater", ["most", "limit"], ["above"]),
            helper.make_node("Cast", ["above"], ["index"], to=TensorProto.INT64),
            helper.make_node("Gather", ["zero", "index"], ["nothing"]),
            helper.make_node("ReduceSum", ["dense", "axis"], ["sums"]),
            helper.make_node("Add", ["sums", "nothing"], ["logits"]),
        ],
        helper.make_tensor("limit", TensorProto.FLOAT, [], [1e3]),
        constant("zero", [0.0], TensorProto.FLOAT),
        constant("axis", [1]),
    )
    put_head(bundle, model.SerializeToString(), rescore=True)
    predictor = Predictor.load(bundle)
    dense = np.full((2, 1), 1e4, np.float32)
    ids = predictor.workflow.transform(predictor.read(ROWS[:1])).ids
    with pytest.raises(BadInputError, match="the bundle's model cannot compute 1 rows"):
        predictor.predict_encoded(dense, ids)
    with serving(tmp_path, "--bundle", str(bundle)) as server:
        assert len(server.predict(rows=ROWS[:1])) == 1


def test_a_server_imports_what_it_needs(original: Path) -> None:
    """PyTorch's compiler took 1.4 s of CPU and 70 MB in each worker, reading of files 10 MB."""
    program = (
        "import sys; import nvt_torchrec.inference.server.app; "
        "from nvt_torchrec.inference.predictor import Predictor; "
        "Predictor.load(sys.argv[1]); "
        "heavy = {'sympy', 'torch._dynamo', 'onnx', 'onnxruntime', 'pandas', 'torchrec'}; "
        "heavy |= {'pyarrow.parquet', 'pyarrow.fs', 'pyarrow.dataset', 'fsspec', 'isal'}; "
        "found = heavy & {*sys.modules}; "
        "assert not found, found"
    )
    done = python("-c", program, original)
    assert done.returncode == 0, done.stderr
