"""The Open Inference Protocol over HTTP, with its binary tensors, as Triton and KServe answer it.

The tensors are those of ``model.onnx`` (:mod:`inference.named_tensors`) as Triton shows them:
[rows, 1] for [rows], which is taken as well. A NaN of JSON is ``null``. As with Triton, the content
type of a request does not matter: its clients send none, or another one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nvt_torchrec.base import __version__
from nvt_torchrec.inference.named_tensors import (
    DTYPES,
    MODEL_NAME,
    OUTPUT,
    Input,
    inputs_of,
    kind_of,
    to_columns,
)
from nvt_torchrec.inference.predictor import Predictor, name_by_label
from nvt_torchrec.inference.server.bodies import (
    Parsed,
    RefusedError,
    check_count,
    check_shared,
    encode,
    read_json,
)
from nvt_torchrec.inference.server.serve_settings import ServerSettings

#: Of a body whose first bytes are JSON and the rest tensors, the number of the first.
BINARY_HEADER = "inference-header-content-length"
#: The only version of the model, as in the repository of :mod:`inference.export.triton`.
_VERSION = "1"
_DATATYPES = {"string": "BYTES", "int64": "INT64", "float64": "FP64"}


def routes(service: Any) -> list[Route]:
    """Return the endpoints of the protocol, for the ``Service`` of :mod:`inference.server.app`."""

    async def server(request: Request) -> Response:
        extensions = ["binary_tensor_data"]
        about = {"name": "nvt-torchrec", "version": __version__, "extensions": extensions}
        return JSONResponse(about)

    async def live(request: Request) -> Response:
        return Response()

    async def ready(request: Request) -> Response:
        _check_name(request)
        return Response(status_code=503 if service.draining else 200)

    async def model(request: Request) -> Response:
        _check_name(request)
        return JSONResponse(metadata(service.served.predictor))

    async def infer(request: Request) -> Response:
        _check_name(request)
        return await service.answer(request, parse_tensors)

    paths = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
    return [
        Route("/v2", server),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        *(Route(path, model) for path in paths),
        *(Route(f"{path}/ready", ready) for path in paths),
        *(Route(f"{path}/infer", infer, methods=["POST"]) for path in paths),
    ]


def _check_name(request: Request) -> None:
    for what, known in (("name", MODEL_NAME), ("version", _VERSION)):
        if (given := request.path_params.get(what, known)) != known:
            raise RefusedError(404, f"no model of {what} {given!r}", remedy=known)


def metadata(predictor: Predictor) -> dict[str, Any]:
    """Return the description of the model: its inputs and its outputs."""
    inputs = [
        {"name": name, "datatype": _DATATYPES[kind], "shape": [-1, 1 if rank == 1 else -1]}
        for column in _inputs(predictor)
        for name, (kind, rank) in column.tensors.items()
    ]
    names = name_by_label(OUTPUT, predictor.labels)
    outputs = [{"name": name, "datatype": "FP32", "shape": [-1, 1]} for name in names]
    about = {"name": MODEL_NAME, "versions": [_VERSION], "platform": "nvt-torchrec"}
    return about | {"inputs": inputs, "outputs": outputs}


def parse_tensors(
    body: bytearray, headers: Mapping[str, str], predictor: Predictor, limits: ServerSettings
) -> Parsed:
    """Return the rows of a request of ``POST /v2/models/NAME/infer``.

    Raises:
        RefusedError: The body is not valid, breaks the feature spec, or is beyond the limits.
    """
    try:
        size = int(headers.get(BINARY_HEADER, len(body)))
        request, binary = read_json(body[:size], limits), memoryview(body)[size:]
        given, at = {}, 0
        for tensor in request["inputs"]:
            length = tensor.get("parameters", {}).get("binary_data_size", 0)
            given[tensor["name"]] = tensor, binary[at : at + length]
            at += length
        asked = {output["name"]: output for output in request.get("outputs", ())}
        names = name_by_label(OUTPUT, predictor.labels)
        if asked.keys() - {*names}:
            raise ValueError(f"outputs {', '.join(asked)}: there is only {', '.join(names)}")
        for name, output in asked.items():
            if unknown := output.get("parameters", {}).keys() - {"binary_data"}:
                raise ValueError(f"output {name} has the unknown parameter {min(unknown)!r}")
        all_binary = request.get("parameters", {}).get("binary_data_output", False)
        as_binary = {
            name: asked.get(name, {}).get("parameters", {}).get("binary_data", all_binary)
            for name in names
            if name in asked or not asked
        }
        optional = {*predictor.workflow.optional, *(c.name for c in _optional_inputs(predictor))}
        columns = [c for c in _inputs(predictor) if c.name not in optional - given.keys()]
        tensors = {
            name: _tensor(name, kind, rank, *given[name])
            for column in columns
            for name, (kind, rank) in column.tensors.items()
        }
        rows = max(map(len, tensors.values()))
        check_count(rows, limits.max_rows)
        own, shared = _to_rows(columns, tensors, rows)
        check_shared(shared, rows, predictor, limits)
        encoded = encode(own, shared, predictor)
        answered_id = {"id": request["id"]} if "id" in request else {}
    except KeyError as error:
        raise RefusedError(400, f"the request has no {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise RefusedError(400, f"not a request of tensors with the same rows: {error}") from None

    def respond(probabilities: np.ndarray) -> Response:
        columns = dict(zip(names, probabilities.T, strict=True))
        outputs, binary = [], b""
        for name, binary_output in as_binary.items():
            values = columns[name]
            output: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": [len(values), 1]}
            if binary_output:
                output["parameters"] = {"binary_data_size": values.nbytes}
                binary += values.tobytes()
            else:
                output["data"] = values.tolist()
            outputs.append(output)
        answer = {"model_name": MODEL_NAME, "model_version": _VERSION, "outputs": outputs}
        answer |= answered_id
        head = json.dumps(answer).encode()
        if not binary:
            return Response(head, media_type="application/json")
        headers = {BINARY_HEADER: str(len(head))}
        return Response(head + binary, media_type="application/octet-stream", headers=headers)

    return encoded, respond


def _inputs(predictor: Predictor) -> list[Input]:
    """Return the columns of the log, and what a request may give besides."""
    return [*inputs_of(predictor.row_spec), *_optional_inputs(predictor)]


def _optional_inputs(predictor: Predictor) -> list[Input]:
    """Return the time of rows, if no column is made of it, aggregates, and columns of tables."""
    spec = predictor.spec
    reads = spec.read_plan(label=False).reads
    times = [Input(r.source, kind_of(r), False) for r in reads if r.source == spec.optional_time]
    aggregates = [Input(column.name, "float64", False) for column in spec.aggregates]
    needed = {column.name for column in inputs_of(spec)}
    joined = [column for column in inputs_of(spec.drop_tables()) if column.name not in needed]
    return [*times, *aggregates, *joined]


def _to_rows(
    columns: list[Input], tensors: dict[str, np.ndarray], rows: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return columns for :func:`encode`, and what tensors of one row have for all rows."""
    shared = {}
    for column in columns:
        sizes = {len(tensors[name]) for name in column.tensors}
        if sizes == {1} and rows > 1:
            (values,) = to_columns([column], tensors).values()
            shared[column.name] = next(iter(values))
        elif sizes != {rows}:
            raise ValueError(f"{column.name} has {max(sizes)} rows of {rows}")
    own = [column for column in columns if column.name not in shared]
    return to_columns(own, tensors), shared


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
