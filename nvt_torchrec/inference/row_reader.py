"""A few rows that are dicts, as in JSON → typed columns: one loop over the values of each row.

The parsers are made once for a spec. What a value means is said elsewhere: by its raw type
(:mod:`formats.feature_spec.raw_types`) and, in columns that are read by rules, by
:mod:`clicklog.in_memory.python_values`. Here are only shorter ways for the values that such columns
usually have, text and numbers.
"""

from __future__ import annotations

import dataclasses
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
    number_of,
)
from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.flat_columns import FlatColumns
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.rows import Jagged, RawRows, add_missing, dense_dtype, mask_of_rows

#: What ``trim`` removes.
_SPACES = " \t"
#: By raw type, the texts of most numbers, and what converts them exactly as Arrow does.
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
        histories: Whose lists ``spec`` has, and which rows need not have.

    Attributes:
        spec: The columns.
    """

    def __init__(self, spec: FeatureSpec, histories: Sequence[StoredHistory] = ()) -> None:
        plan = spec.read_plan(label=False)
        text = read_as_text(plan.reads)
        parsers = [make_parser(read, text=read.source in text) for read in plan.reads]
        optional = {
            spec.optional_time,
            *(name for history in histories for name in history.features),
        }

        def field(index: int, column: int = 0) -> Field:
            read = plan.reads[index]
            placeholder = () if read.multi_hot else RAW_TYPES[read.raw].placeholder
            may_lack = read.source in optional
            return Field(read.source, parsers[index], 1 << column, placeholder, may_lack)

        self.spec, self._plan = spec, plan
        self._dtype = dense_dtype(spec)
        # the columns of histories that have several, whose lists must be of one length
        names = spec.categorical_names
        self._several_lists = [
            {name: names.index(name) for name in history.features}
            for history in histories
            if len(history.columns) > 1
        ]
        # the columns that are a value of the row, and those that are computed of some
        self._dense = {
            j: field(plan.dense[j][0], j)
            for j, column in enumerate(spec.dense)
            if not (column.derive or column.aggregate or column.table)
        }
        self._dense_index = np.array([*self._dense], np.int64)
        self._categorical = {
            j: field(plan.categorical[j][0], j)
            for j, column in enumerate(spec.categorical)
            if not (column.derive or column.table)
        }
        self._derived_dense = [
            j for j, column in enumerate(spec.dense) if column.derive and not column.table
        ]
        self._derived = [
            j for j, column in enumerate(spec.categorical) if column.derive and not column.table
        ]
        # columns of tables are joined later; until then they hold no value
        self._joined = {
            j: () if column.multi_hot else RAW_TYPES[column.raw].placeholder
            for j, column in enumerate(spec.categorical)
            if column.table
        }
        computed_of = [
            *(plan.dense[j] for j in self._derived_dense),
            *(plan.categorical[j] for j in self._derived),
            *plan.groups,
            *plan.tables,
            plan.times,
            () if plan.join_time is None else (plan.join_time,),
        ]
        indices = dict.fromkeys(index for reads in computed_of for index in reads)
        self._sources = {index: field(index, k) for k, index in enumerate(indices)}

    def read(self, rows: Sequence[Mapping[str, Any]]) -> RawRows:
        """Return typed columns of the rows; ignore further keys, such as the label.

        Raises:
            MissingColumnError: A row lacks a column.
            InvalidRowError: A column cannot hold a value.
        """
        count, spec = len(rows), self.spec
        values, dense_bits = _read_fields(rows, self._dense.values())
        flat, bits = _read_fields(rows, self._categorical.values())
        sources = self._read_sources(rows)

        read: np.ndarray = np.array(values, self._dtype).reshape(count, len(self._dense)).T
        dense = read
        if len(self._dense) < len(spec.dense):  # others are computed
            dense = np.zeros((len(spec.dense), count), self._dtype)
            dense[self._dense_index] = read
        dense_missing = mask_of_rows(dense_bits, len(spec.dense))
        for j in self._derived_dense:
            dense[j], absent = feature(spec.dense[j], [sources[i] for i in self._plan.dense[j]])
            add_missing(dense_missing, j, absent)

        categorical: np.ndarray | FlatColumns
        if spec.is_criteo_format:
            categorical = np.array(flat, np.uint32).reshape(count, len(spec.categorical)).T
        else:
            columns: dict[int, list] = {}
            for k, j in enumerate(self._categorical):
                columns[j] = flat[k :: len(self._categorical)]
            for j in self._derived:
                of_sources = [sources[i] for i in self._plan.categorical[j]]
                derived, absent = feature(spec.categorical[j], of_sources)
                assert not isinstance(derived, Jagged)
                columns[j] = derived.tolist()
                bits = [row | int(null) << j for row, null in zip(bits, absent, strict=True)]
            for j, placeholder in self._joined.items():
                columns[j] = [placeholder] * count
            in_order = [columns[j] for j in range(len(spec.categorical))]
            categorical = FlatColumns(spec.categorical, in_order, bits)
            self._check_histories(categorical)
        join_times = None
        if self._plan.join_time is not None:
            join_times = times_of_rows(sources[self._plan.join_time])[0]
        return RawRows(
            labels=np.empty((0, count), np.uint8),
            dense=dense,
            dense_missing=dense_missing,
            categorical=categorical,
            categorical_missing=mask_of_rows(bits, len(spec.categorical)),
            line=np.arange(count),
            lines=count,
            times=times_of_rows(sources[self._plan.times[0]]) if self._plan.times else None,
            groups=hash_keys([[sources[i].parts for i in key] for key in self._plan.groups], count),
            join_times=join_times,
            table_keys=hash_keys(
                [[sources[i].parts for i in key] for key in self._plan.tables], count
            ),
        )

    def _check_histories(self, columns: FlatColumns) -> None:
        for features in self._several_lists:
            check_lengths({name: columns.lengths[index] for name, index in features.items()})

    def _read_sources(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, Converted]:
        """Return what columns and keys are computed of, by its index in the plan."""
        flat, bits = _read_fields(rows, self._sources.values())
        converted = {}
        for k, index in enumerate(self._sources):
            values = RAW_TYPES[self._plan.reads[index].raw].array(flat[k :: len(self._sources)])
            missing = np.array([row >> k & 1 for row in bits], bool)
            converted[index] = Converted(values, missing, np.zeros(len(rows), np.uint8), str)
        return converted


def _read_fields(
    rows: Sequence[Mapping[str, Any]], fields: Collection[Field]
) -> tuple[list, list[int]]:
    """Return the values row by row, and for each row the bits of the missing ones."""
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
    """Return the field of an object; None for an optional one that the row has not."""
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
        text: Whether strings are fields of text also where ``read`` has no rules for them.
    """
    kind = RAW_TYPES[read.raw]
    parse: Parse = kind.from_python
    if text or has_rules(read):
        single = dataclasses.replace(read, multi_hot=False)
        parse = _make_text_parser(single) if kind.is_text else _make_number_parser(single)
    return _make_list_parser(parse) if read.multi_hot else parse


def _make_text_parser(read: Read) -> Parse:
    """Return the parser of a column of text that is read by rules."""
    from_python = RAW_TYPES[read.raw].from_python
    nulls = {text.strip(_SPACES) if read.trim else text for text in read.nulls}

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
        if read.time_format not in EPOCHS:
            return lambda value: None if value is None else parse_by_rules(value, read)
        take_number = functools.partial(_to_microseconds, read=read)
    null_texts = {text.strip(_SPACES) if read.trim else text for text in read.nulls}
    null_numbers = {number_of(text) for text in read.nulls}
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


def _to_microseconds(number: int | float, read: Read) -> int:
    """Return the time of a number of a time format. Raises ValueError."""
    if isinstance(number, int):
        time = number * EPOCHS[read.time_format]
        if RAW_TYPES["time"].contains(time):
            return time
    return parse_by_rules(number, read)  # a fraction, or beyond the limits


def _make_list_parser(parse_item: Parse) -> Parse:
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
