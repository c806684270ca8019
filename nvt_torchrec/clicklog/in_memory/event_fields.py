"""Histories and aggregates that a caller passes with the rows to score."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from nvt_torchrec.clicklog.in_memory.frames import check_aggregate, find_columns
from nvt_torchrec.clicklog.in_memory.row_fields import RowField, RowFields
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.events import Aggregate
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import is_missing
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.rows import CategoryValues

#: The largest length of names whose checks are cached, because names may come from any client.
_MAX_CACHED_NAME = 100
#: Integers up to this are exact as floats; larger ones are checked one by one.
_MAX_USUAL = 2.0**53
#: The smallest share of a name's length that an abbreviation of it must have.
_MIN_ABBREVIATION = 0.75
#: The smallest share of the shorter of two words that must begin both, so that they count as forms
#: of one word, such as "clicks" and "clicked".
_MIN_STEM = 0.75


class _Refused(NamedTuple):
    """The reason why a field is refused.

    Attributes:
        reason: The error.
        remedy: What to do about it.
        columns: If not empty, the field is refused only if it holds objects with one of these keys.
    """

    reason: str
    remedy: str
    columns: frozenset[str] = frozenset()


class EventFields:
    """Checks and reads the histories and aggregates of rows.

    Unknown fields are ignored, unless their names look like a misspelt history or aggregate.
    Ignoring these would score the row as if it did not have the value.

    Args:
        spec: The columns of rows.
        histories: The histories that rows may have.
    """

    def __init__(self, spec: FeatureSpec, histories: Sequence[StoredHistory]) -> None:
        self._spec = spec
        sources = {read.source for read in spec.read_plan(label=False).reads}
        self._histories = {h.name: set(h.columns) for h in histories if h.name not in sources}
        self._aggregates = {column.name: column for column in spec.aggregates}
        self._rules = {c.name: c.aggregate for c in spec.aggregates if c.aggregate is not None}
        objects = {name.partition(".")[0] for name in sources} - self._histories.keys()
        vectors = {vector.name for vector in spec.vectors}
        known = {*spec.labels, spec.weight, *sources, *objects, *self._aggregates}
        self._known = frozenset(known | vectors)
        self._find_meant = functools.lru_cache(1024)(self._find_meant_field)

    def check(self, fields: RowFields) -> None:
        """Check the names of fields, and the form of histories.

        Raises:
            InvalidRowError: A row has an unknown field whose name looks like a history or an
                aggregate.
            SchemaError: Such a field is a column, or shared by all rows.
        """
        if not (self._histories or self._aggregates):
            return
        for name in fields.names - self._known:
            if name in self._histories:
                self._check_objects(name, self._histories[name], fields)
                continue
            is_short = len(str(name)) <= _MAX_CACHED_NAME
            find = self._find_meant if is_short else self._find_meant_field
            refused = find(str(name))
            if refused is None:
                continue
            if not refused.columns or _holds_objects(fields.find(name), refused.columns):
                raise fields.error(name, refused.reason, refused.remedy)

    def _find_meant_field(self, name: str) -> _Refused | None:
        """Return why an unknown field is refused; None if it is ignored."""
        outer, _, column = name.partition(".")
        if column and outer in self._histories:
            listed = ", ".join(f"{outer}.{known}" for known in sorted(self._histories[outer]))
            return _Refused(f"history {outer} has no column {column!r}", f"pass {listed}")
        remedy = "did you mean {!r}? otherwise remove or rename it"
        for known, columns in self._histories.items():
            if not is_misspelt(outer, known):
                continue
            reason = f"not a column of the workflow, but similar to the history {known}"
            if column in columns:
                return _Refused(reason, remedy.format(f"{known}.{column}"))
            if not column:
                return _Refused(reason, remedy.format(known), frozenset(columns))
        # Misspelt names come first, because they are the better match among several aggregates with
        # the same parts.
        similar = [known for known in self._aggregates if is_misspelt(name, known)]
        similar += [known for known, rule in self._rules.items() if is_named_for(name, rule)]
        if not similar:
            return None
        reason = f"not a column of the workflow, but similar to the aggregate {similar[0]}"
        return _Refused(reason, remedy.format(similar[0]))

    def _check_objects(self, name: str, columns: set[str], fields: RowFields) -> None:
        """Check that the values of a history's field are objects with its columns, or missing."""
        expected = f"expected an object of lists: {', '.join(sorted(columns))}"
        remedy = f'pass {{"{min(columns)}": […]}}'
        field = fields.find(name)
        assert field is not None
        if isinstance(field.values, list):
            for position, value in enumerate(field.values):
                if isinstance(value, Mapping) and value.keys() <= columns:
                    continue
                # is_missing handles single values only, and lists are never missing
                if isinstance(value, Sequence) or not is_missing(value):
                    row = field.get_row(position)
                    raise InvalidRowError(row, name, f"{value!r:.60}: {expected}", remedy)
            return
        held = field.values.type
        is_struct = pa.types.is_struct(held) and {inner.name for inner in held} <= columns
        if not (is_struct or pa.types.is_null(held)):
            raise fields.error(name, f"of type {held}: {expected}", remedy)

    def read_aggregates(self, fields: RowFields) -> tuple[np.ndarray, np.ndarray]:
        """Return the aggregates of rows, which override the workflow's own values.

        Returns:
            The values, float64 [aggregates, n], NaN where missing; and which rows have the field,
            bool [aggregates, n].

        Raises:
            InvalidRowError: The aggregate cannot have a value.
        """
        shape = len(self._aggregates), fields.rows
        usual = self._read_usual_aggregates(fields)
        if usual is not None:
            return usual, np.ones(shape, np.bool_)
        numbers = np.full(shape, np.nan)
        given = np.zeros(shape, np.bool_)
        for j, name in enumerate(self._aggregates):
            field = fields.find(name) if name in fields.names else None
            if field is None:
                continue
            given[j] = True
            given[j, field.lacks] = False
            values, missing = _read_numbers(name, field, fields, self._spec)
            numbers[j] = check_aggregate(self._aggregates[name], values, missing, given[j])
        return numbers, given

    def _read_usual_aggregates(self, fields: RowFields) -> np.ndarray | None:
        """Return all aggregates, float64 [aggregates, n], if all rows have each as a number.

        None for other rows. Their aggregates are converted like columns, which takes longer than
        scoring a row.
        """
        if not fields.rows or not self._aggregates.keys() <= fields.names:
            return None
        columns = []
        for name, column in self._aggregates.items():
            assert column.aggregate is not None
            field = fields.find(name)
            if field is None or field.index is not None or not isinstance(field.values, list):
                return None
            kind = column.aggregate.kind
            minimum = max(kind.minimum, -_MAX_USUAL)
            maximum = min(kind.maximum, _MAX_USUAL)
            for value in field.values:
                if type(value) is not float and type(value) is not int:
                    return None
                if not minimum <= value <= maximum or (kind.is_whole and value % 1):
                    return None
            columns.append(field.values)
        return np.array(columns, np.float64).reshape(-1, fields.rows)


def _read_numbers(
    name: str, field: RowField, fields: RowFields, spec: FeatureSpec
) -> tuple[CategoryValues, np.ndarray]:
    """Return the numbers of a field, float64 [n], and where they are missing, bool [n]."""
    values = field.values
    if isinstance(values, list) and field.index is None and {*map(type, values)} <= {int, float}:
        # Numbers from JSON. Converting a few of them like columns takes longer than scoring rows.
        numbers = RAW_TYPES["float"].convert_vectorized(values, {float})
        if numbers is not None:
            return numbers
    (found,) = find_columns(fields, [Read(name, "float")], spec, [name])
    column = found.repeat()
    return column.values, column.missing


def _holds_objects(field: RowField | None, columns: frozenset[str]) -> bool:
    """Return whether a field holds objects with one of these keys."""
    if field is None:
        return False
    if isinstance(field.values, list):
        objects = [value for value in field.values if isinstance(value, Mapping)]
        return any(columns & value.keys() for value in objects)
    held = field.values.type
    return pa.types.is_struct(held) and any(inner.name in columns for inner in held)


def is_named_for(name: str, aggregate: Aggregate) -> bool:
    """Return whether a name has the parts of an aggregate's name: its key and its kind of value.

    Between them may be a form of the aggregate's label or source, and a window may follow:
    ``user_rate``, ``user_clicks_rate`` and ``user_rate_7d`` are all named for
    ``user_clicked_rate``. With any other word between them, such as in ``user_login_count``, the
    name refers to something else.
    """
    key = re.escape("_".join(aggregate.key or ["all"]).lower())
    parts = re.fullmatch(rf"{key}_(?:(.+)_)?{aggregate.value}(?:_\d+[smhd])?", name.lower())
    if parts is None:
        return False
    word = parts[1] or ""
    label = (aggregate.label or aggregate.source).lower()
    shorter = min(len(word), len(label))
    if not word:  # without a word between them, the name refers to the log's own events
        return not aggregate.source
    return _count_same(word, label) > _MIN_STEM * shorter > 0


def is_misspelt(name: str, known: str) -> bool:
    """Return whether a name is probably a misspelling of a known one.

    It is if one letter was replaced, added or dropped, or two adjacent ones were exchanged; if it
    is an abbreviation; or if only numbers differ. Case is ignored.
    """
    name = re.sub(r"\d+", "0", name.lower())
    known = re.sub(r"\d+", "0", known.lower())
    if name == known:
        return True
    # Compare lengths first, which is fast, because a request may have many fields.
    min_length = min(_MIN_ABBREVIATION * len(known), len(known) - 1)
    if not min_length <= len(name) <= len(known) + 1:
        return False
    is_long = len(name) >= _MIN_ABBREVIATION * len(known)
    if is_long and name[:1] == known[:1] and _is_subsequence(name, known):
        return True
    return _differ_by_one_edit(name, known)


def _is_subsequence(letters: str, text: str) -> bool:
    """Return whether ``letters`` remain when some letters of a text are removed."""
    rest = iter(text)
    return all(letter in rest for letter in letters)  # "in" consumes the iterator up to its match


def _count_same(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return same


def _differ_by_one_edit(first: str, second: str) -> bool:
    """Return whether one letter was replaced, added or dropped, or two adjacent ones exchanged."""
    same = _count_same(first, second)
    first = first[same:]
    second = second[same:]
    is_exchanged = first[:2] == second[1::-1] and first[2:] == second[2:]
    is_replaced = first[1:] == second[1:]
    is_added = first[1:] == second
    is_dropped = first == second[1:]
    return is_exchanged or is_replaced or is_added or is_dropped
