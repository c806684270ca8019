"""The Open Inference Protocol over HTTP, with its binary tensors, as Triton and KServe answer it.

The tensors are those of ``model.onnx`` (:mod:`inference.tensors`) as Triton shows them: [rows, 1]
for [rows], which is taken as well. A NaN of JSON is ``null``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from nvt_torchrec import __version__
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.bodies import (
    Parsed,
    RefusedError,
    check_count,
    encode,
    read_json,
)
from nvt_torchrec.inference.tensors import DTYPES, MODEL_NAME, OUTPUT, inputs_of, to_columns

#: Of a body whose first bytes are JSON and the rest tensors, the number of the first.
BINARY_HEADER = "inference-header-content-length"
_JSON = "application/json"
_DATATYPES = {"string": "BYTES", "int64": "INT64", "float64": "FP64"}


def router(service: Any) -> APIRouter:
    """Return the endpoints of the protocol, for the ``Service`` of :mod:`inference.server.app`."""
    routes = APIRouter(tags=["Open Inference Protocol"])

    async def model(name: str, version: str = "1") -> Response:
        _check_name(name, version)
        return Response(json.dumps(metadata(service.served.predictor.spec)), media_type=_JSON)

    async def ready(name: str = MODEL_NAME, version: str = "1") -> Response:
        _check_name(name, version)
        return Response(status_code=503 if service.draining else 200)

    async def infer(request: Request, name: str, version: str = "1") -> Response:
        _check_name(name, version)
        return await service.answer(request, parse_tensors)

    @routes.get("/v2")
    async def server() -> dict[str, Any]:
        extensions = ["binary_tensor_data"]
        return {"name": "nvt-torchrec", "version": __version__, "extensions": extensions}

    @routes.get("/v2/health/live")
    async def live() -> Response:
        return Response()

    @routes.get("/v2/health/ready")
    async def server_ready() -> Response:
        return await ready()

    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes.add_api_route(path, model, methods=["GET"])
        routes.add_api_route(f"{path}/ready", ready, methods=["GET"])
        routes.add_api_route(f"{path}/infer", infer, methods=["POST"])
    return routes


def _check_name(name: str, version: str) -> None:
    if (name, version) != (MODEL_NAME, "1"):
        raise RefusedError(404, f"no model {name!r} of version {version!r}", remedy=MODEL_NAME)


def metadata(spec: FeatureSpec) -> dict[str, Any]:
    """Return the description of the model: its inputs and its output."""
    inputs = [
        {"name": name, "datatype": _DATATYPES[kind], "shape": [-1, 1 if rank == 1 else -1]}
        for column in inputs_of(spec)
        for name, (kind, rank) in column.tensors.items()
    ]
    outputs = [{"name": OUTPUT, "datatype": "FP32", "shape": [-1, 1]}]
    about = {"name": MODEL_NAME, "versions": ["1"], "platform": "nvt-torchrec"}
    return about | {"inputs": inputs, "outputs": outputs}


def parse_tensors(
    body: bytes, headers: Mapping[str, str], predictor: Predictor, max_rows: int
) -> Parsed:
    """Return the rows of a request of ``POST /v2/models/NAME/infer``.

    Raises:
        RefusedError: The body is not valid, breaks the feature spec, or has more than ``max_rows``.
    """
    try:
        size = int(headers.get(BINARY_HEADER, len(body)))
        request, binary = read_json(body[:size]), memoryview(body)[size:]
        given, at = {}, 0
        for tensor in request["inputs"]:
            length = tensor.get("parameters", {}).get("binary_data_size", 0)
            given[tensor["name"]] = tensor, binary[at : at + length]
            at += length
        asked = {output["name"]: output for output in request.get("outputs", ())}
        as_binary = request.get("parameters", {}).get("binary_data_output", False)
        as_binary = asked.get(OUTPUT, {}).get("parameters", {}).get("binary_data", as_binary)
        if asked.keys() - {OUTPUT}:
            raise ValueError(f"outputs {', '.join(asked)}: there is only {OUTPUT}")
        columns = inputs_of(predictor.spec)
        tensors = {
            name: _tensor(name, kind, rank, *given[name])
            for column in columns
            for name, (kind, rank) in column.tensors.items()
        }
        (rows,) = {len(values) for values in tensors.values()}
        check_count(rows, max_rows)
        encoded = encode(to_columns(columns, tensors), predictor)
    except KeyError as error:
        raise RefusedError(400, f"the request has no {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise RefusedError(400, f"not a request of tensors with the same rows: {error}") from None

    def respond(probabilities: np.ndarray) -> Response:
        shape = [len(probabilities), 1]
        output: dict[str, Any] = {"name": OUTPUT, "datatype": "FP32", "shape": shape}
        answer = {"model_name": MODEL_NAME, "model_version": "1", "outputs": [output]}
        answer |= {"id": request["id"]} if "id" in request else {}
        if not as_binary:
            output["data"] = probabilities.tolist()
            return Response(json.dumps(answer), media_type=_JSON)
        data = probabilities.tobytes()
        output["parameters"] = {"binary_data_size": len(data)}
        head = json.dumps(answer).encode()
        headers = {BINARY_HEADER: str(len(head))}
        return Response(head + data, media_type="application/octet-stream", headers=headers)

    return encoded, respond


def _tensor(
    name: str, kind: str, rank: int, tensor: Mapping[str, Any], binary: memoryview
) -> np.ndarray:
    """Return an input. Raises ValueError if it is not of its kind and shape."""
    shape, datatype = [*tensor["shape"]], _DATATYPES[kind]
    if tensor["datatype"] != datatype or len(shape) not in (rank, 2):
        raise ValueError(f"{name} is {tensor['datatype']} {shape}, not {datatype} of [rows, 1]")
    values: Any = tensor.get("data")
    if values is None and kind == "string":
        values = _strings(binary)
    elif values is None:
        values = np.frombuffer(binary, DTYPES[kind])
    array = np.array(values, object if kind == "string" else None).reshape(shape)
    if kind == "string":
        good = all(isinstance(text, str) for text in array.flat)
    else:  # null is NaN
        good = array.dtype.kind in ("i" if kind == "int64" else "ifO") or not array.size
        array = array.astype(DTYPES[kind])
    if not good:
        raise ValueError(f"{name} has values that are not {datatype}")
    return array.reshape(len(array)) if rank == 1 else array


def _strings(binary: memoryview) -> list[str]:
    texts, at = [], 0
    while at < len(binary):
        (length,) = struct.unpack_from("<I", binary, at)
        at += 4 + length
        if at > len(binary):
            raise ValueError("a string is cut off")
        texts.append(str(binary[at - length : at], "utf-8"))
    return texts
