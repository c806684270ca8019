"""The exported model in genuine servers, asked by the same client as ours: ``make test-servers``.

The wheel of ``nvidia-pytriton`` has Triton's binary, but not its ONNX Runtime backend: here its
Python backend calls ONNX Runtime. So does a model of KServe's ModelServer.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http

from benchmarks.inference import read_first_rows
from nvt_torchrec.inference.export.triton import export_triton
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from tests.inference.conftest import Trained
from tests.inference.test_protocol import MODEL, given_to_client
from tests.shell import ROOT, free_port

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"

_SESSION = """
import sys
sys.path.insert(0, {site!r})  # Triton starts another Python
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession({file!r})

def run(given):
    for value in session.get_inputs():
        array = given[value.name]
        if array.dtype == object:
            texts = [t.decode() if isinstance(t, bytes) else t for t in array.ravel()]
            array = np.array(texts, object).reshape(array.shape)
        given[value.name] = array.reshape(len(array)) if len(value.shape) == 1 else array
    return session.run(["probability"], given)[0]
"""
_TRITON = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        names = [value.name for value in session.get_inputs()]
        given = [{n: pb.get_input_tensor_by_name(r, n).as_numpy() for n in names} for r in requests]
        return [pb.InferenceResponse([pb.Tensor("probability", run(one))]) for one in given]
"""
_KSERVE = """
from kserve import InferOutput, InferResponse, Model, ModelServer

class Exported(Model):
    def load(self):
        self.ready = True
        return True

    def predict(self, payload, headers=None, response_headers=None):
        values = run({tensor.name: tensor.as_numpy() for tensor in payload.inputs})
        output = InferOutput("probability", [len(values), 1], "FP32")
        output.set_data_from_numpy(values[:, None], binary_data=False)
        return InferResponse(payload.id, self.name, [output])

model = Exported("click_probability")
model.load()
ModelServer(http_port=int(sys.argv[1]), enable_grpc=False, workers=1).start([model])
"""


def triton(package: Path, repository: Path, folder: Path, port: int) -> list[object]:
    """The command of a Triton server of a model repository."""
    program = _SESSION.format(site=str(package), file=str(repository / MODEL / "1" / "model.onnx"))
    (repository / MODEL / "1" / "model.py").write_text(program + _TRITON)
    config = repository / MODEL / "config.pbtxt"
    text = config.read_text()
    assert 'backend: "onnxruntime"' in text
    config.write_text(text.replace('backend: "onnxruntime"', 'backend: "python"'))
    home, backend = package / "pytriton" / "tritonserver", folder / "backends" / "python"
    backend.mkdir(parents=True)
    stub = home / "python_backend_stubs" / PYTHON[6:] / "triton_python_backend_stub"
    for file in (*(home / "backends" / "python").iterdir(), stub):
        (backend / file.name).symlink_to(file)  # they find their libraries from where they are
    flags = ["--backend-directory", backend.parent, "--http-port", port]
    flags += ["--allow-grpc", "false", "--allow-metrics", "false"]
    return [home / "bin" / "tritonserver", "--model-repository", repository, *flags]


def kserve(package: Path, repository: Path, folder: Path, port: int) -> list[object]:
    """The command of a KServe ModelServer."""
    program = _SESSION.format(site=str(package), file=str(repository / MODEL / "1" / "model.onnx"))
    return [package.parents[2] / "bin" / "python", "-c", program + _KSERVE, port]


@contextlib.contextmanager
def running(
    command: list[object], port: int, log: Path
) -> Iterator[tritonclient.http.InferenceServerClient]:
    libraries = {"LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR")}  # with Python's own
    with open(log, "wb") as output:
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, env=os.environ | libraries
        )
    try:
        client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=100)
        while True:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError):
                if client.is_model_ready(MODEL):
                    break
            time.sleep(0.1)
        yield client
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("make", [triton, kserve], ids=["nvidia-pytriton", "kserve"])
def test_it_answers_triton_s_client_as_our_server_does(
    make: Callable, shop: Trained, shop_predictor: Predictor, tmp_path: Path, request
) -> None:
    """Compare test_protocol.py, which asks ours."""
    place = ROOT / "build" / "servers" / request.node.callspec.id
    if not (place / "built").exists():
        pytest.skip("`make test-servers` installs it")
    repository = tmp_path / "repository"
    write_bundle(shop.workflow, shop.checkpoint, tmp_path / "bundle")
    export_triton(tmp_path / "bundle", repository)
    port = int(free_port())
    command = make(place / "lib" / PYTHON / "site-packages", repository, tmp_path, port)
    rows = read_first_rows(str(sorted(shop.raw.iterdir())[-1]), shop_predictor.spec, 60)
    tensors = to_tensors(list_inputs(shop_predictor.spec), rows)
    with running(command, port, tmp_path / "log") as client:
        for binary in (True, False):
            kept, inputs = given_to_client(tensors, binary=binary)
            outputs = [tritonclient.http.InferRequestedOutput("probability", binary_data=binary)]
            headers = {} if binary else {"Content-Type": "application/json"}  # KServe needs it
            answer = client.infer(MODEL, inputs, outputs=outputs, request_id="7", headers=headers)
            expected = shop_predictor.predict(list(itertools.compress(rows, kept)))
            np.testing.assert_allclose(answer.as_numpy("probability"), expected[:, None], atol=1e-6)
