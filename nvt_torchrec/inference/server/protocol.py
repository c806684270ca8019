"""The Open Inference Protocol over HTTP, with binary tensors, compatible with Triton and KServe.

The tensors are those of ``model.onnx`` (:mod:`inference.named_tensors`) in Triton's shapes: [rows,
1] instead of [rows], although [rows] is accepted too. NaN is ``null`` in JSON. As in Triton, the
content type of a request is ignored, because clients send none or a wrong one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
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
    get_tensor_type,
    list_inputs,
    list_inputs_without_tables,
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

#: The header with the number of bytes of JSON at the start of a body; binary tensors follow.
BINARY_HEADER = "inference-header-content-length"
#: The only version of the model, as in the model repository of :mod:`inference.export.triton`.
_VERSION = "1"
#: Kind of tensor → the protocol's name for it.
_DATATYPES = {"string": "BYTES", "int64": "INT64", "float64": "FP64", "float32": "FP32"}


def make_routes(service: Any) -> list[Route]:
    """Make the protocol's endpoints for a :class:`inference.server.app.Service`."""

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
        return JSONResponse(describe_model(service.served.predictor))

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
    """Raise RefusedError if a path has another name or version than the model's."""
    name = request.path_params.get("name", MODEL_NAME)
    if name != MODEL_NAME:
        raise RefusedError(404, f"no model named {name!r}", remedy=f"ask for {MODEL_NAME}")
    version = request.path_params.get("version", _VERSION)
    if version != _VERSION:
        raise RefusedError(404, f"no version {version!r}", remedy=f"ask for version {_VERSION}")


def describe_model(predictor: Predictor) -> dict[str, Any]:
    """Return the model's metadata: its inputs and outputs."""
    inputs = []
    for column in _list_inputs(predictor):
        for name, (kind, _) in column.tensors.items():
            shape = [-1, column.get_second_size(name)]
            inputs.append({"name": name, "datatype": _DATATYPES[kind], "shape": shape})
    outputs = []
    for name in name_by_label(OUTPUT, predictor.labels):
        outputs.append({"name": name, "datatype": "FP32", "shape": [-1, 1]})
    return {
        "name": MODEL_NAME,
        "versions": [_VERSION],
        "platform": "nvt-torchrec",
        "inputs": inputs,
        "outputs": outputs,
    }


def parse_tensors(
    body: bytearray, headers: Mapping[str, str], predictor: Predictor, limits: ServerSettings
) -> Parsed:
    """Parse the body of ``POST /v2/models/NAME/infer``.

    Raises:
        RefusedError: The body is invalid, does not fit the feature spec, or exceeds a limit.
    """
    names = name_by_label(OUTPUT, predictor.labels)
    try:
        json_size = int(headers.get(BINARY_HEADER, len(body)))
        request = read_json(body[:json_size], limits)
        given = _find_tensors(request, memoryview(body)[json_size:])
        is_binary = _find_outputs(request, names)
        columns = _choose_inputs(predictor, given)
        tensors: dict[str, np.ndarray] = {}
        for column in columns:
            for name, (kind, rank) in column.tensors.items():
                size = column.get_second_size(name)
                tensors[name] = _read_tensor(name, kind, rank, size, *given[name])
        num_rows = max(map(len, tensors.values()))
        check_count(num_rows, limits.max_rows)
        own, shared = _to_rows(columns, tensors, num_rows)
        check_shared(shared, num_rows, predictor, limits)
        encoded = encode(own, shared, predictor)
        request_id = {"id": request["id"]} if "id" in request else {}
    except KeyError as error:
        raise RefusedError(400, f"the request has no {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise RefusedError(400, f"not a valid request of the protocol: {error}") from None

    def respond(probabilities: np.ndarray) -> Response:
        values_by_name = dict(zip(names, probabilities.T, strict=True))
        outputs = []
        binary = b""
        for name, as_binary in is_binary.items():
            values = values_by_name[name]
            output: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": [len(values), 1]}
            if as_binary:
                output["parameters"] = {"binary_data_size": values.nbytes}
                binary += values.tobytes()
            else:
                output["data"] = values.tolist()
            outputs.append(output)
        answer = {"model_name": MODEL_NAME, "model_version": _VERSION, "outputs": outputs}
        text = json.dumps(answer | request_id).encode()
        if not binary:
            return Response(text, media_type="application/json")
        headers = {BINARY_HEADER: str(len(text))}
        return Response(text + binary, media_type="application/octet-stream", headers=headers)

    return encoded, respond


def _find_tensors(request: Any, binary: memoryview) -> dict[str, tuple[Any, memoryview]]:
    """Return a request's tensors by name, each with its bytes in the binary part of the body.

    Raises:
        KeyError, TypeError, AttributeError: The request does not have the protocol's structure.
    """
    tensors = {}
    begin = 0
    for tensor in request["inputs"]:
        end = begin + tensor.get("parameters", {}).get("binary_data_size", 0)
        tensors[tensor["name"]] = tensor, binary[begin:end]
        begin = end
    return tensors


def _find_outputs(request: Any, names: Sequence[str]) -> dict[str, bool]:
    """Return the requested outputs; map each to True if its values shall be binary.

    A request that names no outputs gets all of them.

    Raises:
        ValueError: An output or a parameter does not exist.
        KeyError, TypeError, AttributeError: The request does not have the protocol's structure.
    """
    asked = {output["name"]: output for output in request.get("outputs", ())}
    if asked.keys() - {*names}:
        raise ValueError(f"outputs {', '.join(asked)}: the model has only {', '.join(names)}")
    all_binary = request.get("parameters", {}).get("binary_data_output", False)
    is_binary = {}
    for name, output in asked.items():
        parameters = output.get("parameters", {})
        unknown = parameters.keys() - {"binary_data"}
        if unknown:
            raise ValueError(f"output {name} has the unknown parameter {min(unknown)!r}")
        is_binary[name] = parameters.get("binary_data", all_binary)
    if not asked:
        return dict.fromkeys(names, all_binary)
    return {name: is_binary[name] for name in names if name in is_binary}


def _list_inputs(predictor: Predictor) -> list[Input]:
    """Return all inputs: the columns of the log, and the optional inputs."""
    return [*list_inputs(predictor.row_spec), *_list_optional_inputs(predictor)]


def _list_optional_inputs(predictor: Predictor) -> list[Input]:
    """Return the inputs that a request may leave out.

    They are the time of the rows, if no column is derived from it; aggregates; and the columns and
    vectors of tables.
    """
    spec = predictor.spec
    optional = []
    for read in spec.read_plan(label=False).reads:
        if read.source == spec.optional_time:
            optional.append(Input(read.source, get_tensor_type(read), multi_hot=False))
    for aggregate in spec.aggregates:
        optional.append(Input(aggregate.name, "float64", multi_hot=False))
    needed = {column.name for column in list_inputs(spec)}
    for column in list_inputs_without_tables(spec):
        if column.name not in needed:
            optional.append(column)
    return optional


def _choose_inputs(predictor: Predictor, given: Mapping[str, Any]) -> list[Input]:
    """Return the inputs to read: all required ones, and the optional ones that were given."""
    optional = {*predictor.workflow.optional}
    optional.update(column.name for column in _list_optional_inputs(predictor))
    chosen = []
    for column in _list_inputs(predictor):
        if column.name in given or column.name not in optional:
            chosen.append(column)
    return chosen


def _to_rows(
    columns: list[Input], tensors: dict[str, np.ndarray], rows: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert tensors to the columns of the rows, and the values that all rows share.

    In a request of several rows, a tensor of one row is shared by all rows.

    Raises:
        ValueError: A tensor has another number of rows.
    """
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


def _read_tensor(
    name: str, kind: str, rank: int, size: int, tensor: Mapping[str, Any], binary: memoryview
) -> np.ndarray:
    """Read the tensor of an input.

    Args:
        name: The tensor's name.
        kind: Its kind, a key of :data:`.named_tensors.DTYPES`.
        rank: The number of its dimensions.
        size: The size of its second dimension; -1 if it may vary.
        tensor: Its description, with its values unless they are binary.
        binary: Its bytes in the binary part of the body.

    Raises:
        ValueError: The tensor has another data type or shape.
    """
    shape = [*tensor["shape"]]
    datatype = _DATATYPES[kind]
    is_shaped = len(shape) == 2 if rank == 2 else len(shape) in (1, 2)
    if is_shaped and rank == 2:
        is_shaped = size in (-1, shape[1])
    if tensor["datatype"] != datatype or not is_shaped:
        expected = f"{datatype} of [rows, {'length' if size == -1 else size}]"
        raise ValueError(f"{name} is {tensor['datatype']} {shape}, not {expected}")
    values: Any = tensor.get("data")
    if values is None and kind == "string":
        values = _read_strings(binary)
    elif values is None:
        values = np.frombuffer(binary, DTYPES[kind])
    if kind == "string":
        array = np.array(values, object).reshape(shape)
        is_valid = all(isinstance(text, str) for text in array.flat)
    else:
        array = np.array(values).reshape(shape)
        # NumPy's kinds: "i" integers, "f" floats, "O" for numbers with a JSON null among them. An
        # empty list is always float64, so its kind is not checked.
        allowed = "i" if kind == "int64" else "ifO"
        is_valid = array.dtype.kind in allowed or not array.size
        array = array.astype(DTYPES[kind])  # null becomes NaN
    if not is_valid:
        raise ValueError(f"{name} has values that are not {datatype}")
    return array.reshape(len(array)) if rank == 1 else array


def _read_strings(binary: memoryview) -> list[str]:
    """Read strings, each of which is preceded by its length as an unsigned 4-byte integer."""
    texts = []
    offset = 0
    while offset < len(binary):
        (length,) = struct.unpack_from("<I", binary, offset)
        begin = offset + 4
        offset = begin + length
        if offset > len(binary):
            raise ValueError("a string is truncated")
        texts.append(str(binary[begin:offset], "utf-8"))
    return texts
