"""Bodies of requests, and the errors with which they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from starlette.responses import Response

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.validation import strict_json
from nvt_torchrec.clicklog.in_memory.row_fields import open_rows
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError, MissingColumnError
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from nvt_torchrec.models.metrics import unwrap_single_label
from nvt_torchrec.workflows.compiled.compiled_workflow import EncodedRows

#: The rows of a request, and a function of their probabilities that makes its answer.
Parsed: TypeAlias = tuple[EncodedRows, Callable[[np.ndarray], Response]]
#: Of a body, its headers, a predictor and the limits; raises :class:`RefusedError`.
Parser: TypeAlias = Callable[[bytearray, Mapping[str, str], Predictor, ServerSettings], Parsed]

_ENCODER = json.JSONEncoder(allow_nan=False)
#: Bytes that a value of JSON takes as a Python object, and how many more a list or an object takes.
_VALUE_BYTES, _CONTAINER_BYTES = 64, 128
#: Bytes that a value takes for each row that shares it, besides its text.
_SHARED_BYTES = 16
#: How often --max_body_mb the values of a body may take, by these.
_EXPANSION = 16
#: Bodies with fewer bytes and separators than these are parsed and encoded in about a millisecond,
#: whatever they hold: a row takes a separator, and the events that rows share are bounded.
_SMALL_BYTES, _SMALL_SEPARATORS = 16 << 10, 1024


class RefusedError(Exception):
    """A request is answered with an error.

    Attributes:
        status: The HTTP status.
        details: The JSON object of the answer.
    """

    def __init__(self, status: int, error: str, **details: Any) -> None:
        super().__init__(error)
        self.status, self.details = status, {"error": error, **details}

    def answer(self) -> Response:
        """Return the answer."""
        headers = {"Retry-After": "1"} if self.status == 503 else {}
        if self.status in (408, 413):  # the rest of the request is not read
            headers["Connection"] = "close"
        body = json.dumps(self.details)  # ASCII: half a surrogate pair cannot be encoded as UTF-8
        return Response(body, self.status, headers, media_type="application/json")


def parse_body(
    body: bytearray, headers: Mapping[str, str], predictor: Predictor, limits: ServerSettings
) -> Parsed:
    """Return the rows of a request of ``POST /predict``.

    Raises:
        RefusedError: The body is not JSON by its header or content, breaks the feature spec, or is
            beyond the limits.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(415, f"content type {kind!r}", remedy="send application/json")
    rows, shared = _rows(read_json(body, limits), predictor, limits)
    may_have_booleans = b"true" in body or b"false" in body

    def respond(probabilities: np.ndarray) -> Response:
        by_label = zip(predictor.labels, probabilities.T.tolist(), strict=True)
        content = {"probabilities": unwrap_single_label(dict(by_label))}
        return Response(_ENCODER.encode(content), media_type="application/json")

    return encode(rows, shared, predictor, may_have_booleans=may_have_booleans), respond


def is_small(body: bytearray) -> bool:
    """Return whether a body is so little work that the event loop need not be free meanwhile."""
    if len(body) > _SMALL_BYTES:
        return False
    return body.count(b",") + body.count(b"{") + body.count(b"[") <= _SMALL_SEPARATORS


def read_json(body: bytearray, limits: ServerSettings) -> Any:
    """Return the value of a JSON text.

    Raises:
        RefusedError: It is not JSON, or has so many values that they would take too much memory;
            they are counted before they are made.
    """
    values = body.count(b",") + body.count(b":")
    containers = body.count(b"[") + body.count(b"{")
    size = _VALUE_BYTES * values + _CONTAINER_BYTES * containers
    if size > (maximum := _EXPANSION * limits.max_body_bytes):
        raise RefusedError(
            413,
            f"the body's values may take {size >> 20} MiB of memory; the limit is "
            f"{maximum >> 20} MiB",
            remedy="send fewer rows in a request, or raise the server's --max_body_mb",
        )
    try:
        return strict_json(body)
    except ValueError as error:
        raise RefusedError(400, f"not JSON: {error}") from None


def encode(
    rows: Any,
    shared: Mapping[str, Any],
    predictor: Predictor,
    *,
    may_have_booleans: bool = False,
) -> EncodedRows:
    """Encode rows, a list or columns, with fields that all share. Raises :class:`RefusedError`."""
    try:
        if may_have_booleans:
            _refuse_booleans(rows, shared, predictor.row_spec)
        return predictor.encode(rows, shared)
    except (InvalidRowError, MissingColumnError) as error:
        known = {key: getattr(error, key) for key in ("row", "column", "reason", "remedy")}
        where = {key: value for key, value in known.items() if value not in (None, "")}
        raise RefusedError(422, "invalid row", **where) from None
    except SchemaError as error:
        raise RefusedError(422, error.what, remedy=error.remedy) from None


def _refuse_booleans(rows: Any, shared: Mapping[str, Any], spec: FeatureSpec) -> None:
    """Refuse true and false in columns of other raw types: to Python they are the numbers 1 and 0.

    Raises:
        InvalidRowError: There is one.
    """
    reads = spec.drop_tables().read_plan(label=False).reads
    fields = open_rows(rows, reads, shared)
    given = [Read(column.name, "float") for column in spec.aggregates]
    for read in (*reads, *given):
        field = fields.find(read.source) if read.raw != "bool" else None
        for position, value in enumerate(field.values if field else ()):
            if bool in map(type, value if isinstance(value, list) else [value]):
                reason = f"{value!r:.60}: {RAW_TYPES[read.raw].syntax}"
                row = field.row_of(position) if field else 0
                raise InvalidRowError(row, read.source, reason, "true is 1, false 0")


def _rows(
    value: Any, predictor: Predictor, limits: ServerSettings
) -> tuple[list[dict] | dict[str, list], dict[str, Any]]:
    """Return the rows of a body, and the fields that they share."""
    shared = value.pop("shared", {}) if isinstance(value, dict) else {}
    if not isinstance(shared, dict):
        raise RefusedError(422, "'shared' is not an object of the fields that all rows share")
    match value:
        case {"rows": list(rows), **others} if not others:
            count = len(rows)
            for index, row in enumerate(rows):
                if not isinstance(row, dict):
                    raise RefusedError(422, "invalid row", row=index, reason="not an object")
        case {"columns": dict(rows), **others} if not others:
            if not all(isinstance(values, list) for values in rows.values()):
                raise RefusedError(422, "a column of 'columns' is not a list")
            count = max(map(len, rows.values()), default=0)
        case _:
            raise RefusedError(
                422,
                "the body is no object with a list 'rows' or an object 'columns'",
                remedy='send {"rows": [{"COLUMN": VALUE}]} or {"columns": {"COLUMN": [VALUE]}}, '
                'and perhaps "shared": {"COLUMN": VALUE} beside them',
            )
    check_count(count, limits.max_rows)
    check_shared(shared, count, predictor, limits)
    return rows, shared


def check_shared(
    shared: Mapping[str, Any], count: int, predictor: Predictor, limits: ServerSettings
) -> None:
    """Check that so many rows can share fields: each takes their values, and the newest events.

    Raises:
        RefusedError: The values would take too much memory.
    """
    workflow, size = predictor.workflow, 0
    for name, value in shared.items():
        nested = isinstance(value, Mapping)
        fields = {f"{name}.{inner}": v for inner, v in value.items()} if nested else {name: value}
        for field, values in fields.items():
            if isinstance(values, list) and field in workflow.optional:
                values = values[-workflow.max_events :]
            number = len(values) if isinstance(values, list) else 1
            size += len(json.dumps(values, default=str)) + _SHARED_BYTES * number
    size *= count
    if size > (maximum := _EXPANSION * limits.max_body_bytes):
        raise RefusedError(
            413,
            f"the fields that {count} rows share may take {size >> 20} MiB of memory; the limit is "
            f"{maximum >> 20} MiB",
            remedy="send fewer rows or shorter lists, or raise the server's --max_body_mb",
        )


def check_count(rows: int, max_rows: int) -> None:
    """Raise :class:`RefusedError` if there are too many rows."""
    if rows > max_rows:
        raise RefusedError(
            413,
            f"{rows} rows; the limit is {max_rows}",
            remedy="send them in several requests, or raise the server's --max_rows",
        )
