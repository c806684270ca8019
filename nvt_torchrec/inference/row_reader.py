"""Read a few rows that are dicts, as in JSON, into typed columns: a loop over each row's values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nvt_torchrec.clicklog.in_memory.frames import check_lengths
from nvt_torchrec.clicklog.in_memory.python_values import list_text_sources
from nvt_torchrec.clicklog.in_memory.row_fields import get_inner
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError, make_missing_key_error
from nvt_torchrec.clicklog.text.assemble import get_row_times, hash_keys, make_feature
from nvt_torchrec.clicklog.text.convert import Converted
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.flat_columns import FlatColumns
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.rows import Jagged, RawRows, add_missing, get_dense_dtype, make_mask
from nvt_torchrec.inference.value_parsers import Parse, make_parser


class Field(NamedTuple):
    """A value to read from each row.

    Attributes:
        name: The column of the log, or OBJECT.FIELD.
        parse: The column's parser.
        bit: The bit of the column in masks of missing values.
        placeholder: The value to store where the row's value is missing.
        optional: True if rows may lack the key; the value is then missing.
    """

    name: str
    parse: Parse
    bit: int
    placeholder: Any
    optional: bool


class RowReader:
    """Reads rows that are dicts, with the columns of any spec.

    Args:
        spec: The columns.
        histories: The histories whose lists are among the columns of ``spec``. Rows may lack them.

    Attributes:
        spec: The columns.
    """

    def __init__(self, spec: FeatureSpec, histories: Sequence[StoredHistory] = ()) -> None:
        plan = spec.read_plan(label=False)
        text_columns = list_text_sources(plan.reads)
        parsers = [make_parser(read, text=read.source in text_columns) for read in plan.reads]
        optional = {spec.optional_time}
        for history in histories:
            optional.update(history.features)

        def make_field(index: int, column: int) -> Field:
            """Return the field of read ``index``; its missing values set the bit of ``column``."""
            read = plan.reads[index]
            placeholder = () if read.multi_hot else RAW_TYPES[read.raw].placeholder
            is_optional = read.source in optional
            return Field(read.source, parsers[index], 1 << column, placeholder, is_optional)

        self.spec = spec
        self._plan = plan
        self._dtype = get_dense_dtype(spec)
        # Dense columns are either a value of the row or derived from values. Aggregates and columns
        # of tables are skipped: they are added after the rows have been read.
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
        # Categorical columns are also a value of the row or derived. Columns of tables get
        # placeholders until the tables are joined.
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
        source_indices = [plan.dense[j] for j in self._derived_dense]
        source_indices += [plan.categorical[j] for j in self._derived]
        source_indices += [*plan.groups, *plan.tables, plan.times]
        if plan.join_time is not None:
            source_indices.append((plan.join_time,))
        self._sources: dict[int, Field] = {}
        for indices in source_indices:
            for index in indices:
                if index not in self._sources:
                    self._sources[index] = make_field(index, len(self._sources))
        # Histories with several columns, whose lists must be equally long in each row: the index of
        # each column, by name.
        names = spec.categorical_names
        self._joint_lists: list[dict[str, int]] = []
        for history in histories:
            if len(history.columns) > 1:
                self._joint_lists.append({name: names.index(name) for name in history.features})

    def read(self, rows: Sequence[Mapping[str, Any]]) -> RawRows:
        """Return typed columns of the rows; ignore additional keys, such as the label.

        Raises:
            MissingColumnError: A row lacks a column.
            InvalidRowError: A column cannot hold a value.
        """
        count = len(rows)
        sources = self._read_sources(rows)
        dense, dense_missing = self._read_dense(rows, sources)
        categorical, bits = self._read_categorical(rows, sources)
        times = join_times = None
        if self._plan.times:
            times = get_row_times(sources[self._plan.times[0]])
        if self._plan.join_time is not None:
            join_times = get_row_times(sources[self._plan.join_time])[0]
        return RawRows(
            labels=np.empty((0, count), np.uint8),
            dense=dense,
            dense_missing=dense_missing,
            categorical=categorical,
            categorical_missing=make_mask(bits, len(self.spec.categorical)),
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
        """Return the dense columns [columns, rows], and the mask of their missing values."""
        count = len(rows)
        spec = self.spec
        values, bits = _read_fields(rows, self._dense.values())
        dense: np.ndarray = np.array(values, self._dtype).reshape(count, len(self._dense)).T
        if len(self._dense) < len(spec.dense):
            # Make room for the derived columns, below, and those that are added later.
            given = dense
            dense = np.zeros((len(spec.dense), count), self._dtype)
            dense[self._dense_index] = given
        missing = make_mask(bits, len(spec.dense))
        for j in self._derived_dense:
            column_sources = [sources[index] for index in self._plan.dense[j]]
            dense[j], is_absent = make_feature(spec.dense[j], column_sources)
            add_missing(missing, j, is_absent)
        return dense, missing

    def _read_categorical(
        self, rows: Sequence[Mapping[str, Any]], sources: Mapping[int, Converted]
    ) -> tuple[np.ndarray | FlatColumns, list[int]]:
        """Return the categorical columns, and for each row the bits of its missing values."""
        count = len(rows)
        spec = self.spec
        flat, bits = _read_fields(rows, self._categorical.values())
        if spec.is_criteo_format:
            return np.array(flat, np.uint32).reshape(count, len(spec.categorical)).T, bits
        columns: dict[int, list] = {}
        for k, j in enumerate(self._categorical):
            columns[j] = flat[k :: len(self._categorical)]  # `flat` is stored row by row
        for j in self._derived:
            column_sources = [sources[index] for index in self._plan.categorical[j]]
            derived, is_absent = make_feature(spec.categorical[j], column_sources)
            assert not isinstance(derived, Jagged)
            columns[j] = derived.tolist()
            bits = [row | int(absent) << j for row, absent in zip(bits, is_absent, strict=True)]
        for j, placeholder in self._joined.items():
            columns[j] = [placeholder] * count
        ordered_columns = [columns[j] for j in range(len(spec.categorical))]
        categorical = FlatColumns(spec.categorical, ordered_columns, bits)
        self._check_histories(categorical)
        return categorical, bits

    def _check_histories(self, columns: FlatColumns) -> None:
        """Check that each row's lists of a history are equally long. Raises InvalidRowError."""
        for features in self._joint_lists:
            check_lengths({name: columns.lengths[index] for name, index in features.items()})

    def _read_sources(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, Converted]:
        """Read the values from which columns, keys and times are computed, by index in the plan."""
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
    """Hash the keys of rows, int64 [keys, rows]; return None if there are no keys."""
    parts = []
    for key in keys:
        parts.append([sources[index].parts for index in key])
    return hash_keys(parts, count)


def _read_fields(
    rows: Sequence[Mapping[str, Any]], fields: Collection[Field]
) -> tuple[list, list[int]]:
    """Return the values row by row, and for each row the bits of its missing values.

    A row spends most of its time before the model in this loop.

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
    """Return the OBJECT.FIELD of a row; None if the row lacks it and it is optional."""
    outer, _, inner = name.partition(".")
    if inner and outer in row:
        return get_inner(row[outer], outer, inner, row=index)
    if not optional:
        raise make_missing_key_error(index, name)
    return None
