"""The parts of the OpenAPI description that follow from a feature spec."""

from __future__ import annotations

from typing import Any

from clicklog.spec.columns import CategoricalColumn, DenseColumn
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.spec.raw_types import RAW_TYPES
from inference.server.admission import PREDICT

_EXAMPLES = {"int32": 1, "float": 0.5, "int": 7, "hex32": "68fd1e64", "string": "a"}
_ERRORS = {
    400: "no JSON, or an object with a key twice",
    401: "no valid API key, where the server asks for one",
    408: "the body did not come in time",
    413: "too many bytes or rows",
    415: "the content type is not application/json",
    422: "a row that breaks the feature spec, with its number, column and reason",
    500: "the model gave no finite number for a row",
    503: "overloaded, or not scored in time; Retry-After says when to come back",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "string"},
        "row": {"type": "integer", "description": "from 0"},
        "column": {"type": "string"},
        "reason": {"type": "string"},
        "remedy": {"type": "string"},
    },
}


def predict_operation(spec: FeatureSpec) -> dict[str, Any]:
    """Of ``POST /predict``: request body and answers, with an example of a row."""
    columns = (*spec.dense, *spec.categorical)
    row = {
        "type": "object",
        "properties": {column.name: _value(column) for column in columns},
        "required": [column.name for column in columns],
    }
    lists = {
        "type": "object",
        "properties": {
            column.name: {"type": "array", "items": _value(column)} for column in columns
        },
        "required": [column.name for column in columns],
    }
    example = {column.name: _example(column) for column in columns}
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "oneOf": [
                            _only("rows", {"type": "array", "items": row}),
                            _only("columns", lists),
                        ]
                    },
                    "example": {"rows": [example]},
                }
            },
        },
        "responses": {
            "200": {
                "description": "a probability for each row, in their order",
                "content": {
                    "application/json": {
                        "schema": _only(
                            "probabilities", {"type": "array", "items": {"type": "number"}}
                        )
                    }
                },
            },
            **{
                str(status): {
                    "description": text,
                    "content": {"application/json": {"schema": _ERROR}},
                }
                for status, text in _ERRORS.items()
            },
        },
    }


def _only(name: str, schema: dict) -> dict:
    return {"type": "object", "required": [name], "properties": {name: schema}}


def _example(column: DenseColumn | CategoricalColumn) -> Any:
    value = _EXAMPLES[column.raw]
    return [value] if getattr(column, "multi_hot", False) else value


def _value(column: DenseColumn | CategoricalColumn) -> dict[str, Any]:
    schema = _one(column.raw)
    if getattr(column, "multi_hot", False):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"type": "null"}]}
    else:
        schema = {"anyOf": [*schema.pop("anyOf", [schema]), {"type": "null"}]}
    return schema


def _one(raw: str) -> dict[str, Any]:
    if raw == "float":
        return {"type": "number"}
    if raw == "string":
        return {"type": "string"}
    kind = RAW_TYPES[raw]
    integer = {"type": "integer", "minimum": kind.least, "maximum": kind.most}
    if raw == "hex32":
        return {"anyOf": [{"type": "string", "pattern": "^[0-9a-fA-F]{0,8}$"}, integer]}
    return integer


def describe(app: Any, spec: FeatureSpec) -> None:
    """Make an app's ``/openapi.json`` say what ``POST /predict`` takes and answers."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        value = made()
        value["paths"][PREDICT]["post"] |= predict_operation(spec)
        return value

    app.openapi = openapi
