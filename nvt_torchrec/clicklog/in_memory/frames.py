"""Columns in memory → rows: frames of any library, Arrow tables, dicts of arrays or lists."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import (
    check_valid,
    is_list,
    is_text,
    mask_to_arrow,
    null_mask,
    to_arrow,
    to_numpy,
)
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory.python_values import (
    convert_values,
    has_rules,
    read_as_text,
    times_to_arrow,
)
from nvt_torchrec.clicklog.in_memory.value_errors import (
    InvalidRowError,
    MissingColumnError,
    add_remedy,
    keys_of,
    no_such_key,
)
from nvt_torchrec.clicklog.readers.parquet_values import (
    conversion_remedy,
    convert_column,
    fields_of_column,
    wanted,
)
from nvt_torchrec.clicklog.text.assemble import assemble, feature
from nvt_torchrec.clicklog.text.convert import Converted, convert_lists, fields_of
from nvt_torchrec.clicklog.text.remedies import similar_column
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import is_missing
from nvt_torchrec.formats.feature_spec.raw_types.integers import EXACT
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.rows import CategoryValues, RawRows

#: By name, the values [n] of a column and where they are missing, bool [n].
Features = dict[str, tuple[CategoryValues, np.ndarray]]


def read_columns(columns: Any, spec: FeatureSpec, optional: Collection[str] = ()) -> RawRows:
    """Convert a frame, a table or a dict of arrays to typed columns; ignore further columns.

    Args:
        columns: The columns of the log: typed values or, in frames and tables, text as in the log.
            In dicts, text is refused in columns of numbers that are read without rules.
        spec: How they are read.
        optional: Columns that may be absent: their values are missing.

    Raises:
        SchemaError: A column is missing, has a type that cannot hold the raw type, or differs in
            length.
        InvalidRowError: A column cannot hold a value.
    """
    reads = spec.read_plan(label=False).reads
    converted = _convert_reads(columns, reads, spec, optional)
    count = len(converted[0].code)
    return assemble(spec, converted, lambda row: b"", rows=count, label=False, reject=False)


def read_features(columns: Any, spec: FeatureSpec, names: Sequence[str]) -> Features:
    """Convert what some columns of a workflow's input are read or derived from.

    Args:
        columns: See :func:`read_columns`.
        spec: How they are read.
        names: Dense and categorical columns, or labels and the weight, of ``spec``.

    Returns:
        The values [n] of each column and where they are missing, bool [n].

    Raises:
        SchemaError, InvalidRowError: See :func:`read_columns`.
    """
    plan = spec.read_plan(label=True)
    places: dict[str, tuple[int, ...]] = {
        name: (index,) for name, index in zip(spec.labels, plan.labels, strict=True)
    }
    if plan.weight is not None:
        places[spec.weight] = (plan.weight,)
    described = {column.name: column for column in spec.features}
    places |= dict(zip(spec.feature_names, (*plan.dense, *plan.categorical), strict=True))
    every = list(plan.reads)
    for column in spec.aggregates:
        places[column.name] = (len(every),)
        every.append(Read(column.name, "float"))
    needed = sorted({index for name in names for index in places[name]})
    reads = [every[index] for index in needed]
    converted = dict(zip(needed, _convert_reads(columns, reads, spec), strict=True))
    features = {}
    for name in names:
        sources = [converted[index] for index in places[name]]
        features[name] = (
            feature(described[name], sources)
            if name in described
            else (sources[0].values, sources[0].missing)
        )
    return features


def check_columns(names: Iterable[str], sources: Sequence[str]) -> None:
    """Check that all columns are there. Raises :class:`MissingColumnError`."""
    absent = [name for name in sources if name not in names]
    if absent:
        hint = similar_column(absent[0], names, sources) or "missing values are nulls in a column"
        what = f"there is no column {', '.join(absent)}"
        raise MissingColumnError(what, hint.strip(), absent[0])


def _convert_reads(
    columns: Any, reads: Sequence[Read], spec: FeatureSpec, optional: Collection[str] = ()
) -> list[Converted]:
    """Convert columns as they are read, and check each value."""
    names, get = _opened(columns)
    sources = list(dict.fromkeys(read.source for read in reads))
    absent = [name for name in optional if name not in names]
    check_columns(names, [name for name in sources if name not in absent])
    times = {read.source for read in reads if read.raw == "time"}
    arrays = {n: _array(get(n), n, times=n in times) for n in sources if n not in absent}
    arrays |= dict.fromkeys(absent, [None] * len(arrays[sources[0]]))
    counts = {name: len(array) for name, array in arrays.items()}
    for name, count in counts.items():
        if count != counts[sources[0]]:
            raise SchemaError(
                f"column {name} has {count} rows, column {sources[0]} {counts[sources[0]]}"
            )
    text = read_as_text(reads)
    if not isinstance(columns, Mapping):
        text |= {read.source for read in reads if not RAW_TYPES[read.raw].is_text}
    separator = spec.input.list_separator
    converted = [_convert(arrays[r.source], r, separator, text=r.source in text) for r in reads]
    for read, column in zip(reads, converted, strict=True):
        wrong = column.code > 0
        if read.raw == "weight":
            wrong |= column.missing
        if wrong.any():
            row = int(np.argmax(wrong))
            code = int(column.code[row])
            reason = RAW_TYPES[read.raw].message(code) if code else "a weight must not be missing"
            error = InvalidRowError(row, read.source, f"{column.show(row)}: {reason}")
            raise add_remedy(error, spec)
    return converted


def read_aggregates(columns: Any, spec: FeatureSpec) -> dict[str, np.ndarray]:
    """Return the aggregates that a frame, a table or a dict of arrays has, instead of the state's.

    Returns:
        By column float64 [n]; NaN where missing.

    Raises:
        InvalidRowError: A column cannot hold a value.
    """
    held, _ = _opened(columns)
    names = [column.name for column in spec.aggregates if column.name in held]
    features = read_features(columns, spec, names) if names else {}
    return {
        name: np.where(missing, np.nan, np.asarray(values))
        for name, (values, missing) in features.items()
    }


def read_dicts(rows: Sequence[Mapping[str, Any]], spec: FeatureSpec) -> RawRows:
    """Do the same as :meth:`inference.row_reader.RowReader.read`, faster for many rows."""
    columns = {}
    for name in spec.sources(label=False):
        try:
            columns[name] = [row[name] for row in rows]
        except KeyError:
            index = next(i for i, row in enumerate(rows) if name not in row)
            raise no_such_key(index, name) from None
    return read_columns(columns, spec)


def _opened(columns: Any) -> tuple[Any, Any]:
    """Return the names of the columns, and a function that returns a column by its name."""
    if isinstance(columns, pa.Table | pa.RecordBatch):
        return columns.schema.names, columns.column
    if isinstance(columns, Mapping):
        return columns.keys(), columns.__getitem__
    if hasattr(columns, "columns"):  # pandas, Polars, cuDF
        return list(columns.columns), columns.__getitem__
    raise SchemaError(
        f"rows of type {type(columns).__name__}",
        "pass a frame, an Arrow table, a list of dicts or a dict of arrays; a path is for predict",
    )


def _convert(array: pa.Array | list, read: Read, separator: str, *, text: bool) -> Converted:
    if isinstance(array, list):
        return convert_values(array, read, text=text)
    if read.multi_hot and is_text(array.type):  # as in the log
        return convert_lists(fields_of_column(array), read, separator)
    if text and RAW_TYPES[read.raw].is_text and pa.types.is_floating(array.type):
        return convert_values(array.to_pylist(), read, text=text)
    if pa.types.is_floating(array.type) and read.raw != "float":
        _check_exact(array, read.source)
    if not (text or has_rules(read)):
        _check_kind(array, read)
    return convert_column(array, read)


def _check_kind(array: pa.Array, read: Read) -> None:
    """Refuse numbers as text and text as numbers, which in memory are mistakes of the caller."""
    held = array.type
    if is_list(held):
        held = held.value_type
    if pa.types.is_dictionary(held):
        held = held.value_type
    kind = RAW_TYPES[read.raw]
    wrong = (is_text(held) and not kind.takes_text) or (kind.is_text and pa.types.is_integer(held))
    if not wrong:
        return
    keys = "" if kind.is_text else f", or {keys_of(read)}"
    raise SchemaError(
        f"column {read.source} is of type {held}, not {wanted(read)}",
        f"{conversion_remedy(read)}{keys}",
    )


def _array(values: Any, name: str, *, times: bool) -> pa.Array | list:
    """Return an Arrow array if the type of the values is known, else a list of objects."""
    if isinstance(values, pa.ChunkedArray | pa.Array):
        check_valid(values, f"column {name}")
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(values, np.ma.MaskedArray):
        return values.tolist()
    if isinstance(values, np.ndarray):
        if values.ndim == 1 and values.dtype.kind in "biuf" and values.dtype.itemsize <= 8:
            return mask_to_arrow(values) if values.dtype.kind == "b" else to_arrow(values)
        if times and values.ndim == 1 and values.dtype.kind == "M":
            return times_to_arrow(values)
        return _read_objects(list(values))
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise SchemaError(
            f"column {name}: {values!r:.60} is not a column",
            "pass rows as a list of dicts, or columns as a dict of arrays",
        )
    if hasattr(values, "to_arrow"):  # Polars, and cuDF, whose series no NumPy array can be made of
        return _array(values.to_arrow(), name, times=times)
    if isinstance(getattr(values, "dtype", None), np.dtype):  # pandas
        return _array(np.asarray(values), name, times=times)
    if hasattr(values, "__arrow_c_stream__"):
        return _array(pa.chunked_array(values), name, times=times)
    if hasattr(values, "__array__"):
        return _array(np.asarray(values), name, times=times)
    return list(values)


def _read_objects(values: list) -> pa.Array | list:
    """Return an Arrow array if all values are texts or missing, as pandas holds text."""
    kinds = set(map(type, values))
    if str not in kinds or kinds - {str, float, type(None)}:
        return values
    texts = [value if isinstance(value, str) else "" for value in values]
    if float in kinds and not all(is_missing(v) for v in values if isinstance(v, float)):
        return values
    try:
        return fields_of([text.encode() for text in texts]).view(pa.string())
    except UnicodeEncodeError:
        return values  # converted one by one: the error names the row


def _check_exact(array: pa.Array, name: str) -> None:
    limit = EXACT.get(array.type.bit_width // 8)
    if not limit:
        return
    large = np.flatnonzero((np.abs(to_numpy(array)) > limit) & ~null_mask(array))
    if len(large):
        raise SchemaError(
            f"column {name}: {array.type} rounds integers above {limit}, as in row {large[0]}",
            "use float64 or int64",
        )
