"""The Triton repository, driven by a stand-in for Triton's Python module."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from nvt_torchrec.inference import Predictor, write_bundle
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.benchmark import first_rows
from tests.inference.conftest import Trained

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
heavy = ("nvtabular", "dask", "pandas", "torchrec", "nvt_torchrec.dlrm.model")
print(json.dumps([answers, [name for name in heavy if name in sys.modules]]))
model.finalize()
"""


def test_a_triton_repository(shop: Trained, shop_predictor: Predictor, tmp_path: Path) -> None:
    """Strings, lists, prices; bad rows harm nobody else."""
    write_bundle(shop.workflow, shop.checkpoint, tmp_path / "bundle")
    flags = ["--bundle", str(tmp_path / "bundle"), "--output", str(tmp_path / "made")]
    assert main(["export", *flags, "--format", "triton"]) == 0
    repository = (tmp_path / "made").rename(tmp_path / "moved")
    [model] = repository.iterdir()
    config = (model / "config.pbtxt").read_text()
    assert 'backend: "python"' in config
    *inputs, output = re.findall(r'name: "(\w+)", data_type: (\w+), dims: \[ 1 \]', config)
    assert [name for name, _ in inputs] == list(shop_predictor.spec.sources(label=False))
    assert output == ("probability", "TYPE_FP32")

    def tensor(value, kind: str):
        if kind == "TYPE_FP64":
            return float("nan") if value is None else value
        return json.dumps(value) if isinstance(value, list) else value or ""

    def tensors(rows: list[dict]) -> list:
        return [(name, kind, [tensor(row[name], kind) for row in rows]) for name, kind in inputs]

    file = str(sorted(shop.raw.iterdir())[-1])
    rows = first_rows(file, shop_predictor.spec, 60)
    parts = [rows[:1], rows[1:20], rows[20:]]
    bad = [rows[0] | {"country": "x", "recent_products": [[1]]}]
    requests = [tensors(part) for part in (parts[0], bad, *parts[1:])]
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    done = _in_triton(model, tmp_path)
    assert done.returncode == 0, done.stderr
    (first, error, *others), imported = json.loads(done.stdout.splitlines()[-1])
    assert imported == []
    assert "row 0, column recent_products" in error
    got = np.concatenate([first, *others])
    np.testing.assert_allclose(got, shop_predictor.predict(rows), atol=1e-6)
    table = model / "1/bundle/weights/table.npy"
    data = bytearray(table.read_bytes())
    data[-1] ^= 1
    table.write_bytes(data)
    done = _in_triton(model, tmp_path)
    assert "table.npy: not the file that was written" in done.stderr


def _in_triton(model: Path, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", _TRITON, str(model / "1"), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
