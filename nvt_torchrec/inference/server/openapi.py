"""The OpenAPI description of ``POST /predict``, as far as it follows from a feature spec.

The raw types give the JSON schemas, FastAPI the rest. Requests are not validated by them: that
would cost more than scoring a row does.
"""

from __future__ import annotations

import itertools
from typing import Any

from pydantic import BaseModel, Field

from nvt_torchrec.clicklog.in_memory.values import read_as_text
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.reading import Read


class Probabilities(BaseModel):
    """The answer: a probability for each row, in their order."""

    probabilities: list[float]


class Error(BaseModel):
    """Why a request was refused. What does not apply is absent."""

    error: str
    row: int | None = Field(None, description="from 0")
    column: str | None = None
    reason: str | None = None
    remedy: str | None = None


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": Error}
    for status, text in {
        400: "not JSON, or an object with a repeated key",
        408: "the body did not arrive in time",
        413: "too many bytes or rows",
        415: "the content type is not application/json",
        422: "a row that breaks the feature spec, with its number, column, reason and, if one is "
        "known, a remedy",
        500: "the model computed NaN or an infinite number for a row",
        503: "overloaded, or not scored in time; Retry-After says when to try again",
    }.items()
}


def request_body(spec: FeatureSpec) -> dict[str, Any]:
    """Return OpenAPI's ``requestBody`` for rows of ``spec``, with an example."""
    reads = spec.read_plan(label=False).reads
    text = read_as_text(reads)
    sources = {
        name: [read for read in reads if read.source == name] for name in spec.sources(label=False)
    }
    values: dict[str, Any] = {
        name: _value(source_reads, text=name in text) for name, source_reads in sources.items()
    }
    row = _schema("Row", values)
    lists = _schema(
        "Columns", {name: {"type": "array", "items": value} for name, value in values.items()}
    )
    forms = {"rows": {"type": "array", "items": row}, "columns": lists}
    schemas = [
        {"type": "object", "required": [name], "properties": {name: schema}}
        for name, schema in forms.items()
    ]
    example = {
        "rows": [{name: _example(source_reads[0]) for name, source_reads in sources.items()}]
    }
    content = {"application/json": {"schema": {"oneOf": schemas}, "example": example}}
    return {"required": True, "content": content}


def _schema(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "title": name, "properties": properties, "required": required}


def _value(reads: list[Read], *, text: bool) -> dict[str, Any]:
    """Return the schema of a source, which may be read in several ways."""
    raw_types = [*dict.fromkeys(read.raw for read in reads), *(["string"] if text else [])]
    types: list[dict[str, Any]] = []
    for json_type in itertools.chain(*(RAW_TYPES[raw].json_types for raw in raw_types)):
        if json_type not in types:
            types.append(json_type)
    if reads[0].multi_hot:
        items = types[0] if len(types) == 1 else {"anyOf": types}
        types = [{"type": "array", "items": items}]
    return {"anyOf": [*types, {"type": "null"}]}


def _example(read: Read) -> Any:
    value = RAW_TYPES[read.raw].example_of(read)
    return [value] if read.multi_hot else value
