"""Read a few rows that are dicts, as in JSON, into typed columns: a loop over each row's values.

A parser for each column is made once for a spec. What a value means is decided elsewhere: by its
raw type (:mod:`formats.feature_spec.raw_types`) and, in columns that are read by rules, by
:mod:`clicklog.in_memory.python_values`. The parsers here are only shorter ways for the values that
such columns usually have, texts and numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nvt_torchrec.clicklog.in_memory.frames import check_lengths
from nvt_torchrec.clicklog.in_memory.python_values import (
    has_rules,
    parse_by_rules,
    read_as_text,
)
from nvt_torchrec.clicklog.in_memory.row_fields import get_inner
from nvt_torchrec.clicklog.in_memory.value_errors import NOT_A_LIST, InvalidRowError, no_such_key
from nvt_torchrec.clicklog.text.assemble import feature, hash_keys, times_of_rows
from nvt_torchrec.clicklog.text.convert import Converted
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import (
    EMPTY_ITEM,
    MESSAGES,
    is_missing,
    parse_number,
)
from nvt_torchrec.formats.feature_spec.raw_types.time import (
    EPOCHS,
    ISO,
    PLAIN_ISO,
    to_microseconds,
)
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.flat_columns import FlatColumns
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.rows import Jagged, RawRows, add_missing, get_dense_dtype, make_mask

#: The characters that ``trim`` removes.
_SPACES = " \t"
#: By raw type, a test of the texts that most numbers have, and the function that converts these
#: texts exactly as Arrow does.
_PLAIN_TEXTS: dict[str, tuple[Any, Callable[[str], int | float]]] = {
    "hex32": (re.compile("[0-9a-fA-F]{1,8}").fullmatch, functools.partial(int, base=16)),
    "int32": (re.compile("-?[0-9]{1,15}").fullmatch, int),
    "int": (re.compile("-?[0-9]{1,15}").fullmatch, int),
    "time": (re.compile("-?[0-9]{1,15}").fullmatch, int),
    "float": (re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?").fullmatch, float),
}
_NO_PLAIN_TEXTS: tuple[Any, Callable[[str], int | float]] = re.compile("(?!)").match, float
#: Returns a value as the column holds it, None where it is missing; raises ValueError.
Parse: TypeAlias = Callable[[Any], Any]


class Field(NamedTuple):
    """A value of each row.

    Attributes:
        name: The column of the log, or OBJECT.FIELD.
        parse: Its parser.
        bit: The bit of the column in masks of missing values.
        placeholder: What stands where the value is missing.
        optional: Whether rows may lack it: it is missing then.
    """

    name: str
    parse: Parse
    bit: int
    placeholder: Any
    optional: bool


class RowReader:
    """Reads rows that are dicts, of any spec; see :meth:`read`.

    Args:
        spec: The columns.
        histories: The histories, whose lists are among the columns of ``spec``. Rows may lack them.

    Attributes:
        spec: The columns.
    """

    def __init__(self, spec: FeatureSpec, histories: Sequence[StoredHistory] = ()) -> None:
        plan = spec.read_plan(label=False)
        text_columns = read_as_text(plan.reads)
        parsers = [make_parser(read, text=read.source in text_columns) for read in plan.reads]
        optional = {spec.optional_time}
        for history in histories:
            optional.update(history.features)

        def make_field(index: int, column: int) -> Field:
            """Return the field of a read, whose missing values have the bit of a column."""
            read = plan.reads[index]
            placeholder = () if read.multi_hot else RAW_TYPES[read.raw].placeholder
            allows_missing = read.source in optional
            return Field(read.source, parsers[index], 1 << column, placeholder, allows_missing)

        self.spec, self._plan = spec, plan
        self._dtype = get_dense_dtype(spec)
        # Dense columns that are a value of the row, and those that are computed from values.
        # Aggregates and columns of tables are neither: they are added to rows that were read.
        self._dense: dict[int, Field] = {}
        self._derived_dense: list[int] = []
        for j, column in enumerate(spec.dense):
            if column.aggregate or column.table:
                continue
            if column.derive:
                self._derived_dense.append(j)
            else:
                self._dense[j] = make_field(plan.dense[j][0], j)
        self._dense_index = np.array([*self._dense], np.int64)
        # Likewise the categorical columns, and the placeholders of those of tables.
        self._categorical: dict[int, Field] = {}
        self._derived: list[int] = []
        self._joined: dict[int, Any] = {}
        for j, category in enumerate(spec.categorical):
            if category.table:
                self._joined[j] = () if category.multi_hot else RAW_TYPES[category.raw].placeholder
            elif category.derive:
                self._derived.append(j)
            else:
                self._categorical[j] = make_field(plan.categorical[j][0], j)
        # The values from which columns, keys and times are computed, by their index in the plan.
        reads_to_keep = [plan.dense[j] for j in self._derived_dense]
        reads_to_keep += [plan.categorical[j] for j in self._derived]
        reads_to_keep += [*plan.groups, *plan.tables, plan.times]
        if plan.join_time is not None:
            reads_to_keep.append((plan.join_time,))
        self._sources: dict[int, Field] = {}
        for indices in reads_to_keep:
            for index in indices:
                if index not in self._sources:
                    self._sources[index] = make_field(index, len(self._sources))
        # The columns of histories that have several, whose lists must be of one length.
        names = spec.categorical_names
        self._several_lists: list[dict[str, int]] = []
        for history in histories:
            if len(history.columns) > 1:
                self._several_lists.append({name: names.index(name) for name in history.features})

    def read(self, rows: Sequence[Mapping[str, Any]]) -> RawRows:
        """Return typed columns of the rows; ignore further keys, such as the label.

        Raises:
            MissingColumnError: A row lacks a column.
            InvalidRowError: A column cannot hold a value.
        """
        count, spec = len(rows), self.spec
        sources = self._read_sources(rows)
        dense, dense_missing = self._read_dense(rows, sources)
        categorical, bits = self._read_categorical(rows, sources)
        times = join_times = None
        if self._plan.times:
            times = times_of_rows(sources[self._plan.times[0]])
        if self._plan.join_time is not None:
            join_times = times_of_rows(sources[self._plan.join_time])[0]
        return RawRows(
            labels=np.empty((0, count), np.uint8),
            dense=dense,
            dense_missing=dense_missing,
            categorical=categorical,
            categorical_missing=make_mask(bits, len(spec.categorical)),
            line=np.arange(count),
            lines=count,
            times=times,
            groups=_hash(self._plan.groups, sources, count),
            join_times=join_times,
            table_keys=_hash(self._plan.tables, sources, count),
        )

    def _read_dense(
        self, rows: Sequence[Mapping[str, Any]], sources: Mapping[int, Converted]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the dense columns [columns, n], and the mask of their missing values."""
        count, spec = len(rows), self.spec
        values, bits = _read_fields(rows, self._dense.values())
        dense: np.ndarray = np.array(values, self._dtype).reshape(count, len(self._dense)).T
        if len(self._dense) < len(spec.dense):  # others are computed
            read = dense
            dense = np.zeros((len(spec.dense), count), self._dtype)
            dense[self._dense_index] = read
        missing = make_mask(bits, len(spec.dense))
        for j in self._derived_dense:
            column_sources = [sources[index] for index in self._plan.dense[j]]
            dense[j], is_absent = feature(spec.dense[j], column_sources)
            add_missing(missing, j, is_absent)
        return dense, missing

    def _read_categorical(
        self, rows: Sequence[Mapping[str, Any]], sources: Mapping[int, Converted]
    ) -> tuple[np.ndarray | FlatColumns, list[int]]:
        """Return the categorical columns, and for each row the bits of its missing values."""
        count, spec = len(rows), self.spec
        flat, bits = _read_fields(rows, self._categorical.values())
        if spec.is_criteo_format:
            return np.array(flat, np.uint32).reshape(count, len(spec.categorical)).T, bits
        columns: dict[int, list] = {}
        for k, j in enumerate(self._categorical):
            columns[j] = flat[k :: len(self._categorical)]  # they lie row by row
        for j in self._derived:
            column_sources = [sources[index] for index in self._plan.categorical[j]]
            derived, is_absent = feature(spec.categorical[j], column_sources)
            assert not isinstance(derived, Jagged)
            columns[j] = derived.tolist()
            bits = [row | int(absent) << j for row, absent in zip(bits, is_absent, strict=True)]
        for j, placeholder in self._joined.items():
            columns[j] = [placeholder] * count
        in_order = [columns[j] for j in range(len(spec.categorical))]
        categorical = FlatColumns(spec.categorical, in_order, bits)
        self._check_histories(categorical)
        return categorical, bits

    def _check_histories(self, columns: FlatColumns) -> None:
        """Check that the lists of a history are of one length. Raises InvalidRowError."""
        for features in self._several_lists:
            check_lengths({name: columns.lengths[index] for name, index in features.items()})

    def _read_sources(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, Converted]:
        """Return the values from which columns and keys are computed, by index in the plan."""
        flat, bits = _read_fields(rows, self._sources.values())
        converted = {}
        for k, index in enumerate(self._sources):
            values = RAW_TYPES[self._plan.reads[index].raw].array(flat[k :: len(self._sources)])
            missing = np.array([row >> k & 1 for row in bits], bool)
            converted[index] = Converted(values, missing, np.zeros(len(rows), np.uint8), str)
        return converted


def _hash(
    keys: Iterable[Sequence[int]], sources: Mapping[int, Converted], count: int
) -> np.ndarray | None:
    """Return the hashes of the keys of rows, int64 [keys, rows]; None without any key."""
    return hash_keys([[sources[index].parts for index in key] for key in keys], count)


def _read_fields(
    rows: Sequence[Mapping[str, Any]], fields: Collection[Field]
) -> tuple[list, list[int]]:
    """Return the values row by row, and for each row the bits of the missing ones.

    This is the loop in which most of the time goes that a row takes before the model.

    Raises:
        MissingColumnError: A row lacks a column.
        InvalidRowError: A column cannot hold a value.
    """
    values: list[Any] = []
    missing = []
    append = values.append
    for index, row in enumerate(rows):
        bits = 0
        for name, parse, bit, placeholder, optional in fields:
            try:
                given = row[name]
            except KeyError:
                given = _find_inner(row, name, index, optional=optional)
            try:
                value = parse(given)
            except ValueError as error:
                raise InvalidRowError(index, name, f"{given!r:.60}: {error}") from None
            if value is None:
                bits |= bit
                value = placeholder
            append(value)
        missing.append(bits)
    return values, missing


def _find_inner(row: Mapping[str, Any], name: str, index: int, *, optional: bool) -> Any:
    """Return the field of an object in a row; None for an optional one that the row lacks."""
    outer, _, inner = name.partition(".")
    if inner and outer in row:
        return get_inner(row[outer], outer, inner, row=index)
    if not optional:
        raise no_such_key(index, name)
    return None


def make_parser(read: Read, *, text: bool) -> Parse:
    """Return the parser of a column.

    Args:
        read: How it is read.
        text: Whether strings are read as fields of a text file, even if ``read`` has no rules.
    """
    kind = RAW_TYPES[read.raw]
    parse: Parse = kind.from_python
    if text or has_rules(read):
        single = dataclasses.replace(read, multi_hot=False)
        parse = _make_text_parser(single) if kind.is_text else _make_number_parser(single)
    return _make_list_parser(parse) if read.multi_hot else parse


def _trim_nulls(read: Read) -> set[str]:
    """Return the texts that stand for a missing value, as they are once they are trimmed."""
    return {text.strip(_SPACES) if read.trim else text for text in read.nulls}


def _make_text_parser(read: Read) -> Parse:
    """Return the parser of a column of text that is read by rules."""
    from_python = RAW_TYPES[read.raw].from_python
    nulls = _trim_nulls(read)

    def parse(value: Any) -> Any:
        if type(value) is not str:
            return None if value is None else parse_by_rules(value, read)
        if read.trim:
            value = value.strip(_SPACES)
        return None if value in nulls else from_python(value)

    return parse


def _make_number_parser(read: Read) -> Parse:
    """Return the parser of a column of numbers or times that is read by rules."""
    take_number = RAW_TYPES[read.raw].from_python
    if read.raw == "time":
        if read.time_format == ISO:
            return _make_iso_parser(read)
        if read.time_format not in EPOCHS:
            return lambda value: None if value is None else parse_by_rules(value, read)
        take_number = functools.partial(_to_microseconds, read=read)
    null_texts = _trim_nulls(read)
    null_numbers = {parse_number(text) for text in read.nulls}
    is_plain, to_number = _PLAIN_TEXTS.get(read.raw, _NO_PLAIN_TEXTS)
    if read.raw == "float" and read.decimal != ".":
        is_plain, to_number = _NO_PLAIN_TEXTS

    def parse(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is str:
            text = value.strip(_SPACES) if read.trim else value
            if not text or text in null_texts:
                return None
            if is_plain(text):
                return take_number(to_number(text))
        elif type(value) is int or type(value) is float:
            number = take_number(value)
            return None if value in null_numbers else number
        return parse_by_rules(value, read)

    return parse


def _make_iso_parser(read: Read) -> Parse:
    """Return the parser of a column of times in ISO 8601."""
    null_texts = _trim_nulls(read)
    is_plain = re.compile(PLAIN_ISO).fullmatch

    def parse(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is str:
            text = value.strip(_SPACES) if read.trim else value
            if not text or text in null_texts:
                return None
            if is_plain(text):
                # Of a time that is none, such as the 30th of February, the rules say what is wrong.
                with contextlib.suppress(ValueError):
                    return to_microseconds(datetime.datetime.fromisoformat(text))
        return parse_by_rules(value, read)

    return parse


def _to_microseconds(number: int | float, read: Read) -> int:
    """Return the time of a number of a time format. Raises ValueError."""
    if isinstance(number, int):
        time = number * EPOCHS[read.time_format]
        if RAW_TYPES["time"].contains(time):
            return time
    return parse_by_rules(number, read)  # a fraction, or beyond the limits


def _make_list_parser(parse_item: Parse) -> Parse:
    """Return the parser of a column of lists; an empty list is a missing value."""

    def parse(value: Any) -> list | None:
        if is_missing(value):
            return None
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ValueError(NOT_A_LIST)
        items = [parse_item(item) for item in value]
        if None in items:
            raise ValueError(MESSAGES[EMPTY_ITEM])
        return items or None

    return parse
