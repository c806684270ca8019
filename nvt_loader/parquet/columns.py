"""The columns of a parquet file, by its Arrow schema: present, of a type that can be converted."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.schema import TableSchema


def is_list(kind: pa.DataType) -> bool:
    """Whether a column type holds a list in each row."""
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_number(kind: pa.DataType) -> bool:
    """Whether a column type can be read as float32."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def check_columns(
    found: pa.Schema, schema: TableSchema, path: Path, weights: dict[str, str] | None = None
) -> None:
    """Refuse a file that lacks a column or holds it in a type that cannot be converted.

    Raises:
        SchemaError: the message names file and column.
    """
    wanted = dict.fromkeys([schema.label, *schema.dense], "numbers")
    wanted |= dict.fromkeys(schema.categorical, "integer ids")
    wanted |= dict.fromkeys(schema.multi_hot, "lists of integer ids")
    wanted |= dict.fromkeys((weights or {}).values(), "lists of numbers")
    for name, what in wanted.items():
        index = found.get_field_index(name)
        if index < 0:
            close = difflib.get_close_matches(name, set(found.names) - wanted.keys(), n=1)
            raise SchemaError(
                f"{path}: column {name} is missing" + (f" (there is {close[0]})" if close else ""),
                "all files of a split need the columns of its .merlin/schema.json",
            )
        kind = found.field(index).type
        lists = is_list(kind)
        inner = kind.value_type if lists else kind
        fits = pa.types.is_integer(inner) if "ids" in what else is_number(inner)
        if lists != what.startswith("lists") or not fits:
            raise SchemaError(
                f"{path}: column {name} is {kind}, not {what}",
                "write labels and dense features as float32, ids as int32, multi-hot ids as "
                "list<int32>, and say in the schema which columns are lists",
            )


def find_leaves(footer: pq.FileMetaData, columns: Iterable[str]) -> dict[str, int]:
    """Return the number of the leaf that holds the values of each column, flat or a list."""
    fields = footer.schema.to_arrow_schema()
    first = itertools.accumulate((_count_leaves(field.type) for field in fields), initial=0)
    leaves = dict(zip(fields.names, first, strict=False))  # leaves' paths are ambiguous
    return {name: leaves[name] for name in columns}


def _count_leaves(kind: pa.DataType) -> int:
    return sum(_count_leaves(kind.field(i).type) for i in range(kind.num_fields)) or 1
