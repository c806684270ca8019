"""Convert rows in memory to typed columns: dicts, frames, Arrow tables, dicts of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import is_list, is_text, null_mask, to_arrow, to_numpy
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory.python_values import (
    convert_values,
    has_rules,
    list_text_sources,
)
from nvt_torchrec.clicklog.in_memory.row_fields import RowField, RowFields, open_rows
from nvt_torchrec.clicklog.in_memory.value_errors import (
    InvalidRowError,
    MissingColumnError,
    add_remedy,
)
from nvt_torchrec.clicklog.readers.parquet_values import (
    convert_column,
    describe_wanted,
    suggest_conversion,
    to_text_fields,
)
from nvt_torchrec.clicklog.text.assemble import assemble, make_feature
from nvt_torchrec.clicklog.text.convert import Converted, convert_lists
from nvt_torchrec.clicklog.text.remedies import suggest_column
from nvt_torchrec.formats.feature_spec import DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.integers import EXACT
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.feature_spec.spec_variants import allow_scoring
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.rows import CategoryValues, Jagged, RawRows, repeat_lists

#: The values [n] of columns by name, and where they are missing, bool [n].
Features = dict[str, tuple[CategoryValues, np.ndarray]]


def read_columns(columns: Any, spec: FeatureSpec) -> RawRows:
    """Convert a frame, a table or a dict of arrays to typed columns; ignore other columns.

    Args:
        columns: The columns of the log: typed values, or text as in the log.
        spec: How they are read.

    Raises:
        SchemaError: A column is missing, has a type that does not fit its raw type, or has another
            length.
        InvalidRowError: A value does not fit its column.
    """
    return read_rows(open_rows(columns, spec.read_plan(label=False).reads), spec)


def read_dicts(rows: Sequence[Mapping[str, Any]], spec: FeatureSpec) -> RawRows:
    """Convert dicts as :meth:`inference.row_reader.RowReader.read` does, but faster if many."""
    return read_rows(open_rows(rows, spec.read_plan(label=False).reads), spec)


def read_rows(
    fields: RowFields,
    spec: FeatureSpec,
    histories: Sequence[StoredHistory] = (),
    max_events: int = 0,
) -> RawRows:
    """Convert the fields of rows to typed columns.

    Args:
        fields: The rows.
        spec: How they are read.
        histories: Histories whose lists are columns of ``spec``; rows need not have them.
        max_events: The largest number of newest events that are taken from a shared history.

    Raises:
        SchemaError, InvalidRowError: See :func:`read_columns`.
    """
    reads = spec.read_plan(label=False).reads
    history_lists: set[str] = set()
    for history in histories:
        history_lists |= {*history.features}
    columns = find_columns(fields, reads, spec, {*history_lists, spec.optional_time})
    lengths = {column.read.source: column.lengths for column in columns if column.read.multi_hot}
    for history in histories:
        check_lengths({name: lengths[name] for name in history.features})
    converted = []
    for column in columns:
        newest = max_events if column.read.source in history_lists else None
        converted.append(column.repeat(newest))
    # find_columns has raised for any wrong value, so no row is bad
    rows = fields.rows
    return assemble(spec, converted, lambda row: b"", rows=rows, label=False, max_bad_rows=0)


def read_features(columns: Any, spec: FeatureSpec, names: Sequence[str]) -> Features:
    """Read the named columns of a workflow's input, deriving them if the spec does.

    Args:
        columns: The columns of the log, see :func:`read_columns`.
        spec: How they are read.
        names: Names of dense and categorical columns, labels and the weight of ``spec``.

    Returns:
        The values [n] of each column and where they are missing, bool [n].

    Raises:
        SchemaError, InvalidRowError: See :func:`read_columns`.
    """
    if spec.negatives or spec.label_files:  # a frame has the labels as columns of their names
        spec = allow_scoring(spec)
    plan = spec.read_plan(label=True)
    all_reads = list(plan.reads)
    indices: dict[str, tuple[int, ...]] = {}  # for each name, the indices of its sources
    for name, index in zip(spec.labels, plan.labels, strict=True):
        assert index is not None
        indices[name] = (index,)
    if plan.weight is not None:
        indices[spec.weight] = (plan.weight,)
    indices |= zip(spec.feature_names, (*plan.dense, *plan.categorical), strict=True)
    for column in spec.aggregates:  # given as columns, not computed from events
        indices[column.name] = (len(all_reads),)
        all_reads.append(Read(column.name, "float"))
    needed: set[int] = set()
    for name in names:
        needed |= {*indices[name]}
    reads = [all_reads[index] for index in sorted(needed)]
    found = find_columns(open_rows(columns, reads), reads, spec)
    converted = {}
    for index, column_found in zip(sorted(needed), found, strict=True):
        converted[index] = column_found.repeat()
    for column in spec.aggregates:
        if column.name in names:
            (index,) = indices[column.name]
            check_aggregate(column, converted[index].values, converted[index].missing)
    described = {column.name: column for column in spec.features}
    features = {}
    for name in names:
        sources = [converted[index] for index in indices[name]]
        if name in described:
            features[name] = make_feature(described[name], sources)
        else:
            features[name] = sources[0].parts
    return features


def check_columns(names: Iterable[str], sources: Sequence[str]) -> None:
    """Check that no column is missing. Raises :class:`MissingColumnError`."""
    absent = [name for name in sources if name not in names]
    if absent:
        hint = suggest_column(absent[0], names, sources) or "missing values are nulls in a column"
        what = f"there is no column {', '.join(absent)}"
        raise MissingColumnError(what, hint.strip(), absent[0])


@dataclasses.dataclass(frozen=True)
class FoundColumn:
    """A converted field; rows that share a value refer to one copy of it.

    Attributes:
        read: How the field is read.
        converted: The distinct values.
        index: The index of each row's value, see :class:`.row_fields.RowField`; without -1.
    """

    read: Read
    converted: Converted
    index: np.ndarray | None

    @property
    def lengths(self) -> np.ndarray:
        """The number of values of each row in a column of lists, [n]."""
        assert isinstance(self.converted.values, Jagged)
        lengths = np.diff(self.converted.values.offsets)
        return lengths if self.index is None else lengths[self.index]

    def repeat(self, newest: int | None = None) -> Converted:
        """Return a value for each row; of shared lists, only the last ``newest`` values."""
        column = self.converted
        index = self.index
        if index is None:
            return column
        values = column.values
        if isinstance(values, Jagged):
            values = repeat_lists(values, index, newest)
        elif isinstance(values, pa.Array):
            values = values.take(to_arrow(index))
        else:
            values = values[index]
        return Converted(values, column.missing[index], column.code[index], column.show)


def find_columns(
    fields: RowFields, reads: Sequence[Read], spec: FeatureSpec, optional: Collection[str] = ()
) -> list[FoundColumn]:
    """Convert fields, and check each value.

    Args:
        fields: The rows.
        reads: How the fields are read.
        spec: The spec, for its list separator and for remedies.
        optional: Fields that may be absent; their values are then missing.

    Raises:
        SchemaError, InvalidRowError: See :func:`read_columns`.
    """
    text = list_text_sources(reads)
    if fields.has_text:
        text |= {read.source for read in reads if not RAW_TYPES[read.raw].is_text}
    found: dict[str, RowField] = {}
    absent = []
    for name in dict.fromkeys(read.source for read in reads):
        field = fields.find(name)
        if (field is None or len(field.lacks)) and name not in optional:
            absent.append(name)
            continue
        if field is None:
            found[name] = RowField([None], np.zeros(fields.rows, np.int64))
        else:
            found[name] = field.fill()
    if absent:
        raise fields.missing(absent)
    columns = []
    for read in reads:
        field = found[read.source]
        as_text = read.source in text
        try:
            column = _convert(field.values, read, spec.input.list_separator, text=as_text)
        except InvalidRowError as error:
            row = field.get_row(error.row)
            raise InvalidRowError(row, error.column, error.reason, error.remedy) from None
        _check(column, field, read, spec)
        columns.append(FoundColumn(read, column, field.index))
    return columns


def _check(column: Converted, field: RowField, read: Read, spec: FeatureSpec) -> None:
    """Raise :class:`InvalidRowError` if a value is wrong."""
    wrong = column.code > 0
    if read.raw == "weight":
        wrong |= column.missing
    if wrong.any():
        position = int(np.argmax(wrong))
        code = int(column.code[position])
        reason = RAW_TYPES[read.raw].message(code) if code else "a weight must not be missing"
        what = f"{column.show(position)}: {reason}"
        raise add_remedy(InvalidRowError(field.get_row(position), read.source, what), spec)


def check_lengths(lengths: Mapping[str, np.ndarray]) -> None:
    """Check that all lists of a history have the same length in a row.

    Args:
        lengths: The lengths of the lists of each column, [n].

    Raises:
        InvalidRowError: A row has lists of different lengths.
    """
    maximum = np.max([*lengths.values()], axis=0)
    for name, column_lengths in lengths.items():
        is_shorter = column_lengths < maximum
        if is_shorter.any():
            row = int(np.argmax(is_shorter))
            raise InvalidRowError(
                row,
                name,
                f"a list of {column_lengths[row]}, but another column of the history has "
                f"{maximum[row]}",
                "pass lists of the same length in all columns of a history: the values at one "
                "position belong to one event",
            )


def check_aggregate(
    column: DenseColumn,
    values: CategoryValues,
    missing: np.ndarray,
    given: np.ndarray | None = None,
) -> np.ndarray:
    """Check the values of an aggregate that a caller passed.

    Args:
        column: The aggregate.
        values: The values, float64 [n].
        missing: Where they are missing, bool [n].
        given: Which rows have the field, bool [n]; None if all have.

    Returns:
        The values, float64 [n]; NaN where missing.

    Raises:
        InvalidRowError: The aggregate cannot have a value.
    """
    assert column.aggregate is not None
    kind = column.aggregate.kind
    numbers = np.where(missing, np.nan, np.asarray(values))
    wrong = kind.find_wrong(numbers)
    if given is not None:
        wrong &= given
    if wrong.any():
        row = int(np.argmax(wrong))
        value = None if missing[row] else numbers[row].item()
        raise InvalidRowError(
            row,
            column.name,
            f"{value!r}: expected {kind.unit}",
            "correct it, or remove the field to use the workflow's value",
        )
    return numbers


def _convert(array: pa.Array | list, read: Read, separator: str, *, text: bool) -> Converted:
    """Convert the distinct values of a field.

    Args:
        array: The values.
        read: How they are read.
        separator: The character between the values of a list in text.
        text: Whether texts are parsed like fields of a text file, whatever the raw type.

    Raises:
        SchemaError: The type of the array does not fit.
        InvalidRowError: The type of a value does not fit.
    """
    if isinstance(array, list):
        return convert_values(array, read, text=text)
    if read.multi_hot and is_text(array.type):  # lists as in a text file
        return convert_lists(to_text_fields(array), read, separator)
    if text and RAW_TYPES[read.raw].is_text and pa.types.is_floating(array.type):
        return convert_values(array.to_pylist(), read, text=text)
    if pa.types.is_floating(array.type) and read.raw != "float":
        _check_exact(array, read.source)
    if not (text or has_rules(read)):
        _check_kind(array, read)
    return convert_column(array, read)


def _check_kind(array: pa.Array, read: Read) -> None:
    """Raise SchemaError for numbers in a column of strings, whose form in the log is unknown."""
    held = array.type
    if is_list(held):
        held = held.value_type
    if pa.types.is_dictionary(held):
        held = held.value_type
    if not (RAW_TYPES[read.raw].is_text and pa.types.is_integer(held)):
        return
    raise SchemaError(
        f"column {read.source} is of type {held}, not {describe_wanted(read)}",
        suggest_conversion(read),
    )


def _check_exact(array: pa.Array, name: str) -> None:
    """Raise SchemaError for float16 or float32 with integers that they cannot hold exactly."""
    limit = EXACT.get(array.type.bit_width // 8)
    if not limit:
        return
    large = np.flatnonzero((np.abs(to_numpy(array)) > limit) & ~null_mask(array))
    if len(large):
        raise SchemaError(
            f"column {name}: {array.type} rounds integers above {limit}, as in row {large[0]}",
            "use float64 or int64",
        )
