"""Parse the bodies of requests; refuse invalid and too large ones."""

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

#: The rows of a request, and a function that turns their probabilities into the answer.
Parsed: TypeAlias = tuple[EncodedRows, Callable[[np.ndarray], Response]]
#: A function of a body, its headers, a predictor and the limits; raises :class:`RefusedError`.
Parser: TypeAlias = Callable[[bytearray, Mapping[str, str], Predictor, ServerSettings], Parsed]

_ENCODER = json.JSONEncoder(allow_nan=False)
# Estimates of the memory that a body's values take:
#: The bytes of a JSON value as a Python object.
_VALUE_BYTES = 64
#: The additional bytes of a list or an object.
_CONTAINER_BYTES = 128
#: The bytes that a shared value takes for each row, in addition to its text.
_SHARED_BYTES = 16
#: By these estimates, the values of a body may take this many times --max_body_mb.
_EXPANSION = 16
#: Any body up to this size, with up to this many separators, is parsed and encoded in about a
#: millisecond: each row needs a separator, and the number of shared events is bounded.
_SMALL_BYTES = 16 << 10
_SMALL_SEPARATORS = 1024


class RefusedError(Exception):
    """Error that is the answer to a request.

    Attributes:
        status: The HTTP status.
        details: The JSON object of the answer.
    """

    def __init__(self, status: int, error: str, **details: Any) -> None:
        super().__init__(error)
        self.status = status
        self.details = {"error": error, **details}

    def answer(self) -> Response:
        """Return the answer."""
        headers = {"Retry-After": "1"} if self.status == 503 else {}
        if self.status in (408, 413):  # the rest of the request is not read
            headers["Connection"] = "close"
        # json.dumps writes ASCII: a string of the request may contain half a surrogate pair, which
        # UTF-8 cannot encode.
        body = json.dumps(self.details)
        return Response(body, self.status, headers, media_type="application/json")


def parse_body(
    body: bytearray, headers: Mapping[str, str], predictor: Predictor, limits: ServerSettings
) -> Parsed:
    """Parse the body of ``POST /predict``.

    Raises:
        RefusedError: The content type or the body is not JSON, the rows do not fit the feature
            spec, or a limit is exceeded.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(415, f"content type {kind!r}", remedy="send application/json")
    rows, shared = _take_rows(read_json(body, limits), predictor, limits)
    may_have_booleans = b"true" in body or b"false" in body

    def respond(probabilities: np.ndarray) -> Response:
        by_label = dict(zip(predictor.labels, probabilities.T.tolist(), strict=True))
        content = {"probabilities": unwrap_single_label(by_label)}
        return Response(_ENCODER.encode(content), media_type="application/json")

    return encode(rows, shared, predictor, may_have_booleans=may_have_booleans), respond


def is_small(body: bytearray) -> bool:
    """Return True if a body is so small that the event loop itself may parse it."""
    if len(body) > _SMALL_BYTES:
        return False
    return body.count(b",") + body.count(b"{") + body.count(b"[") <= _SMALL_SEPARATORS


def read_json(body: bytearray, limits: ServerSettings) -> Any:
    """Return the value of a JSON body.

    Raises:
        RefusedError: The body is not JSON, or its values would take too much memory.
    """
    # Separators are counted before parsing, because the objects of a body such as "[[],[],…]" take
    # a hundred times its size.
    num_values = body.count(b",") + body.count(b":")
    num_containers = body.count(b"[") + body.count(b"{")
    size = _VALUE_BYTES * num_values + _CONTAINER_BYTES * num_containers
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
        predictor: The predictor that encodes the rows.
        may_have_booleans: True if true or false may occur among the values.

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
    """Refuse true and false in columns that are not ``bool``.

    Otherwise they would count as 1 and 0, because Python's bool is an int.

    Raises:
        InvalidRowError: A value of another column is true or false.
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
    """Return the rows of a body, and the fields that all rows share. Raises RefusedError."""
    shared = value.pop("shared", {}) if isinstance(value, dict) else {}
    if not isinstance(shared, dict):
        raise RefusedError(422, "'shared' is not an object with the fields that all rows share")
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
                'optionally with "shared": {"COLUMN": VALUE} next to them',
            )
    check_count(count, limits.max_rows)
    check_shared(shared, count, predictor, limits)
    return rows, shared


def check_shared(
    shared: Mapping[str, Any], count: int, predictor: Predictor, limits: ServerSettings
) -> None:
    """Check that shared fields do not take too much memory once each row has a copy of them.

    Args:
        shared: The fields, or objects of fields.
        count: The number of rows.
        predictor: The predictor of the rows, which limits the events of a history.
        limits: The limits.

    Raises:
        RefusedError: The fields would take too much memory.
    """
    workflow = predictor.workflow
    vectors = {vector.name for vector in workflow.spec.vectors}
    row_size = 0
    for name, value in shared.items():
        if name in vectors:  # all rows refer to a single copy
            continue
        fields = {name: value}
        if isinstance(value, Mapping):
            fields = {f"{name}.{inner}": item for inner, item in value.items()}
        for field, values in fields.items():
            if isinstance(values, list) and field in workflow.optional:
                values = values[-workflow.max_events :]
            num_values = len(values) if isinstance(values, list) else 1
            row_size += len(json.dumps(values, default=str)) + _SHARED_BYTES * num_values
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
    """Raise RefusedError if a request has too many rows."""
    if rows > max_rows:
        raise RefusedError(
            413,
            f"{rows} rows; the limit is {max_rows}",
            remedy="send them in several requests, or raise the server's --max_rows",
        )
