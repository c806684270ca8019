"""The Open Inference Protocol, by the genuine client of Triton and by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http

from benchmarks.inference import read_first_rows
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from tests.inference.conftest import Trained
from tests.inference.serving import JSON, Server, request_of, serving

MODEL = "click_probability"


@pytest.fixture(scope="module")
def server(shop: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("protocol")
    write_bundle(shop.workflow, shop.checkpoint, base / "bundle")
    with serving(base, "--bundle", str(base / "bundle"), "--max_rows", "100") as started:
        yield started


@pytest.fixture(scope="module")
def tensors(shop: Trained, shop_predictor: Predictor) -> dict[str, np.ndarray]:
    rows = read_first_rows(str(sorted(shop.raw.iterdir())[-1]), shop_predictor.spec, 60)
    return to_tensors(list_inputs(shop_predictor.spec), rows)


def given_to_client(
    tensors: dict[str, np.ndarray], *, binary: bool
) -> tuple[np.ndarray, list[tritonclient.http.InferInput]]:
    """The inputs for Triton's client, of all rows or, as its JSON has no NaN, of those without."""
    floats = [values for values in tensors.values() if values.dtype.kind == "f"]
    kept = np.full(60, binary) | np.isfinite(floats).all(0)
    assert kept.sum() > 10
    kinds, inputs = {"O": "BYTES", "i": "INT64", "f": "FP64"}, []
    for name, values in tensors.items():
        values = values[kept] if values.ndim == 2 else values[kept, None]
        given = tritonclient.http.InferInput(name, values.shape, kinds[values.dtype.kind])
        inputs.append(given.set_data_from_numpy(values, binary_data=binary))
    return kept, inputs


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client(
    server: Server,
    shop: Trained,
    shop_predictor: Predictor,
    tensors: dict[str, np.ndarray],
    binary: bool,
) -> None:
    """Of JSON alone, it names no content type. One binary input would make it another request."""
    rows = read_first_rows(str(sorted(shop.raw.iterdir())[-1]), shop_predictor.spec, 60)
    kept, inputs = given_to_client(tensors, binary=binary)
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    described = client.get_model_metadata(MODEL, "1")["inputs"]
    assert {(tensor["name"], tensor["datatype"]) for tensor in described} == {
        (tensor.name(), tensor.datatype()) for tensor in inputs
    }
    output = tritonclient.http.InferRequestedOutput("probability", binary_data=binary)
    expected = shop_predictor.predict(list(itertools.compress(rows, kept)))
    for outputs, version in (([output], ""), (None, "1")):
        answer = client.infer(MODEL, inputs, version, outputs=outputs, request_id="7")
        assert answer.get_response()["id"] == "7"
        np.testing.assert_allclose(answer.as_numpy("probability"), expected[:, None], atol=1e-6)
    refused = tritonclient.utils.InferenceServerException
    with pytest.raises(refused, match="content encoding 'gzip'"):
        client.infer(MODEL, inputs, request_compression_algorithm="gzip")
    for model, version, what in (("other", "", "model named 'other'"), (MODEL, "2", "version '2'")):
        with pytest.raises(refused, match=f"no {what}"):
            client.infer(model, inputs, version)


def test_json_and_what_is_refused(
    server: Server, shop_predictor: Predictor, tensors: dict[str, np.ndarray]
) -> None:
    path, good = f"/v2/models/{MODEL}/infer", request_of(tensors)
    status, answer, headers = server.ask(path, good)
    assert (status, headers["X-Bundle"] is not None) == (200, True), answer
    (output,) = json.loads(answer)["outputs"]
    assert (output["shape"], output["datatype"]) == ([60, 1], "FP32")
    first, *others = good["inputs"]
    cases = (
        ([], 400, "the request has no 'inputs'"),
        ({"inputs": others}, 400, f"the request has no '{first['name']}'"),
        ({"inputs": [first | {"datatype": "FP16"}, *others]}, 400, "is FP16 [60], not"),
        ({"inputs": [first | {"shape": [59]}, *others]}, 400, "cannot reshape"),
        ({"inputs": [first | {"shape": [-1]}, *others], "outputs": [{"name": "x"}]}, 400, "only"),
        ({"inputs": [first | {"data": [0.5] * 60}, *others]}, 400, "not INT64"),
        ({"inputs": [{**first, "data": None}, *others]}, 400, "cannot reshape"),
        ({**good, "outputs": [{"name": "probability", "parameters": {"classification": 1}}]}, 400,
         "output probability has the unknown parameter 'classification'"),
    )  # fmt: skip
    for body, expected, reason in cases:
        status, answer, _ = server.ask(path, body if body else {})
        assert status == expected, answer
        assert reason in json.loads(answer)["error"]
    lengths = next(name for name in tensors if name.endswith(".length"))
    for wrong in (-1, tensors[lengths.removesuffix(".length")].shape[1] + 1):
        bad = tensors | {lengths: np.full(60, wrong)}
        status, answer, _ = server.ask(path, request_of(bad))
        assert status == 400
        assert f"{lengths} has a value outside 0 to" in json.loads(answer)["error"]
    many = {name: np.repeat(values, 2, axis=0) for name, values in tensors.items()}
    status, answer, _ = server.ask(path, request_of(many))
    assert (status, json.loads(answer)["error"]) == (413, "120 rows; the limit is 100")
    bad = tensors | {"brand": np.full(60, 2**60)}
    status, answer, _ = server.ask(path, request_of(bad))
    assert (status, json.loads(answer)["column"]) == (422, "brand")
    binary = JSON | {"Inference-Header-Content-Length": "99999999"}
    status, answer, _ = server.ask(path, b"{}", binary)
    assert status == 400
    assert server.ask("/v2/models/other")[0] == 404
