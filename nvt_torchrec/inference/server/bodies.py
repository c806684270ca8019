"""Bodies of requests, and the errors with which they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from starlette.responses import Response

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.validation import parse_strict_json
from nvt_torchrec.clicklog.in_memory.row_fields import open_rows
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError, MissingColumnError
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.feature_spec.spec_variants import drop_tables
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from nvt_torchrec.models.metrics import unwrap_single_label
from nvt_torchrec.workflows.compiled.compiled_workflow import EncodedRows

#: The rows of a request, and a function that makes the answer of their probabilities.
Parsed: TypeAlias = tuple[EncodedRows, Callable[[np.ndarray], Response]]
#: Takes a body, its headers, a predictor and the limits; raises :class:`RefusedError`.
Parser: TypeAlias = Callable[[bytearray, Mapping[str, str], Predictor, ServerSettings], Parsed]

_ENCODER = json.JSONEncoder(allow_nan=False)
#: Bytes that a value of JSON takes as a Python object.
_VALUE_BYTES = 64
#: Bytes that a list or an object takes in addition.
_CONTAINER_BYTES = 128
#: Bytes that a shared value takes for each row, in addition to its text.
_SHARED_BYTES = 16
#: The values of a body may take this many times --max_body_mb, by the estimates above.
_EXPANSION = 16
#: A body up to this size, with up to this many separators, is parsed and encoded in about a
#: millisecond, whatever it holds: each row needs a separator, and the events that rows share are
#: bounded.
_SMALL_BYTES = 16 << 10
_SMALL_SEPARATORS = 1024


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
        # In ASCII: a text of the request may hold half a surrogate pair, which UTF-8 cannot encode.
        body = json.dumps(self.details)
        return Response(body, self.status, headers, media_type="application/json")


def parse_body(
    body: bytearray, headers: Mapping[str, str], predictor: Predictor, limits: ServerSettings
) -> Parsed:
    """Return the rows of a request of ``POST /predict``.

    Raises:
        RefusedError: The body is not JSON by its header or content, does not fit the feature spec,
            or is beyond the limits.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(415, f"content type {kind!r}", remedy="send application/json")
    rows, shared = _take_rows(read_json(body, limits), predictor, limits)
    may_have_booleans = b"true" in body or b"false" in body

    def respond(probabilities: np.ndarray) -> Response:
        by_label = zip(predictor.labels, probabilities.T.tolist(), strict=True)
        content = {"probabilities": unwrap_single_label(dict(by_label))}
        return Response(_ENCODER.encode(content), media_type="application/json")

    return encode(rows, shared, predictor, may_have_booleans=may_have_booleans), respond


def is_small(body: bytearray) -> bool:
    """Return whether parsing a body is so little work that the event loop may do it."""
    if len(body) > _SMALL_BYTES:
        return False
    return body.count(b",") + body.count(b"{") + body.count(b"[") <= _SMALL_SEPARATORS


def read_json(body: bytearray, limits: ServerSettings) -> Any:
    """Return the value of a JSON text.

    Raises:
        RefusedError: It is not JSON, or its values would take too much memory.
    """
    # Separators are counted before anything is parsed: a body of "[[],[],…]" takes a hundred times
    # its size as objects.
    values = body.count(b",") + body.count(b":")
    containers = body.count(b"[") + body.count(b"{")
    size = _VALUE_BYTES * values + _CONTAINER_BYTES * containers
    max_size = _EXPANSION * limits.max_body_bytes
    if size > max_size:
        raise RefusedError(
            413,
            f"the body's values may take {size >> 20} MiB of memory; the limit is "
            f"{max_size >> 20} MiB",
            remedy="send fewer rows in a request, or raise the server's --max_body_mb",
        )
    try:
        return parse_strict_json(body)
    except ValueError as error:
        raise RefusedError(400, f"not JSON: {error}") from None


def encode(
    rows: Any,
    shared: Mapping[str, Any],
    predictor: Predictor,
    *,
    may_have_booleans: bool = False,
) -> EncodedRows:
    """Encode the rows of a request.

    Args:
        rows: A list of rows, or columns by name.
        shared: The fields that all rows share.
        predictor: Encodes them.
        may_have_booleans: Whether true or false may be among the values.

    Raises:
        RefusedError: A row does not fit the feature spec.
    """
    try:
        if may_have_booleans:
            _refuse_booleans(rows, shared, predictor.row_spec)
        return predictor.encode(rows, shared)
    except (InvalidRowError, MissingColumnError) as error:
        details = {}
        for key in ("row", "column", "reason", "remedy"):
            value = getattr(error, key)
            if value not in (None, ""):
                details[key] = value
        raise RefusedError(422, "invalid row", **details) from None
    except SchemaError as error:
        raise RefusedError(422, error.what, remedy=error.remedy) from None


def _refuse_booleans(rows: Any, shared: Mapping[str, Any], spec: FeatureSpec) -> None:
    """Refuse true and false in columns that are not ``bool``: in Python, True is the integer 1.

    Raises:
        InvalidRowError: There is one.
    """
    reads = drop_tables(spec).read_plan(label=False).reads
    fields = open_rows(rows, reads, shared)
    aggregates = [Read(column.name, "float") for column in spec.aggregates]
    for read in (*reads, *aggregates):
        if read.raw == "bool":
            continue
        field = fields.find(read.source)
        if not field:
            continue
        for position, value in enumerate(field.values):
            items = value if isinstance(value, list) else [value]
            if bool in map(type, items):
                reason = f"{value!r:.60}: {RAW_TYPES[read.raw].syntax}"
                row = field.get_row(position)
                raise InvalidRowError(row, read.source, reason, "write 1 for true and 0 for false")


def _take_rows(
    value: Any, predictor: Predictor, limits: ServerSettings
) -> tuple[list[dict] | dict[str, list], dict[str, Any]]:
    """Return the rows of a body, and the fields that they share. Raises :class:`RefusedError`."""
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
                "the body is not an object with a list 'rows' or an object 'columns'",
                remedy='send {"rows": [{"COLUMN": VALUE}]} or {"columns": {"COLUMN": [VALUE]}}, '
                'and perhaps "shared": {"COLUMN": VALUE} beside them',
            )
    check_count(count, limits.max_rows)
    check_shared(shared, count, predictor, limits)
    return rows, shared


def check_shared(
    shared: Mapping[str, Any], count: int, predictor: Predictor, limits: ServerSettings
) -> None:
    """Check that the fields that rows share do not take too much memory when each row has them.

    Args:
        shared: The fields, or objects of fields.
        count: The number of rows.
        predictor: Takes the rows; of a history it takes the newest events alone.
        limits: The limits.

    Raises:
        RefusedError: They would take too much memory.
    """
    workflow = predictor.workflow
    vectors = {vector.name for vector in workflow.spec.vectors}
    row_size = 0
    for name, value in shared.items():
        if name in vectors:  # rows refer to one copy of it
            continue
        fields = {name: value}
        if isinstance(value, Mapping):
            fields = {f"{name}.{inner}": item for inner, item in value.items()}
        for field, values in fields.items():
            if isinstance(values, list) and field in workflow.optional:
                values = values[-workflow.max_events :]
            number = len(values) if isinstance(values, list) else 1
            row_size += len(json.dumps(values, default=str)) + _SHARED_BYTES * number
    size = row_size * count
    max_size = _EXPANSION * limits.max_body_bytes
    if size > max_size:
        raise RefusedError(
            413,
            f"the fields that {count} rows share may take {size >> 20} MiB of memory; the limit is "
            f"{max_size >> 20} MiB",
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
