"""The OpenAPI description of ``POST /predict``, as far as it follows from a feature spec.

pydantic makes the JSON schemas, FastAPI the rest. Requests are not validated by them: that would
cost more than scoring a row does.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict

from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.reading import Read
from nvt_torchrec.formats.spec.times import EPOCHS
from nvt_torchrec.inference.inputs.rules import read_as_text


def _integer(raw: str) -> Any:
    return Annotated[int, Field(ge=RAW_TYPES[raw].least, le=RAW_TYPES[raw].most)]


_VALUES: dict[str, Any] = {
    "int32": _integer("int32"),
    "int": _integer("int"),
    "hex32": Annotated[str, Field(pattern="^[0-9a-fA-F]{0,8}$")] | _integer("hex32"),
    "float": float,
    "string": str,
    "time": str | int | float,
}
_EXAMPLES = {"int32": 1, "float": 0.5, "int": 7, "hex32": "68fd1e64", "string": "a", "time": ""}
_TIME = datetime.datetime(2014, 10, 30, 12, tzinfo=datetime.UTC)


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
    lists = _schema("Columns", {name: list[value] for name, value in values.items()})
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


def _schema(name: str, types: dict[str, Any]) -> dict[str, Any]:
    return TypeAdapter(TypedDict(name, types)).json_schema()


def _value(reads: list[Read], *, text: bool) -> Any:
    """Return the type of a source, which may be read in several ways."""
    value: Any = _VALUES[reads[0].raw]
    for read in reads[1:]:
        value |= _VALUES[read.raw]
    if text:
        value |= str
    return (list[value] if reads[0].multi_hot else value) | None


def _example(read: Read) -> Any:
    value = _EXAMPLES[read.raw]
    if read.raw == "time":
        value = _time_example(read.time_format)
    return [value] if read.multi_hot else value


def _time_example(time_format: str) -> int | str:
    if time_format in EPOCHS:
        return int(_TIME.timestamp()) * 1_000_000 // EPOCHS[time_format]
    return _TIME.strftime(time_format) if time_format else _TIME.isoformat(" ")
