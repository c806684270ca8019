"""Errors about rows in memory, and what to do about rows that a served workflow refuses.

The errors derive from those of :mod:`base.errors`. The spec of a served workflow is fixed, so a
remedy that names keys of the spec says when they take effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nvt_torchrec.base.errors import BadInputError, BadRowError, SchemaError
from nvt_torchrec.clicklog.text.remedies import value_remedy
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES, base
from nvt_torchrec.formats.feature_spec.read_plan import Read

#: The message for a value of a list column that is no list.
NOT_A_LIST = "expected a list or a missing value"
_LATER = "; keys of the spec take effect with another ETL run and training"


class InvalidRowError(BadRowError):
    """A value that does not fit its column, or a row that cannot be scored.

    Attributes:
        row: Index of the row, from 0.
        column: Name of the column; "" if it is not one column's value.
        reason: The value, and what the column accepts.
        remedy: What to pass instead, and which key of the spec would take the value; "" if neither
            is known.
    """

    def __init__(self, row: int, column: str, reason: str, remedy: str = "") -> None:
        where = f"row {row}, column {column}" if column else f"row {row}"
        super().__init__(f"{where}: {reason}", remedy)
        self.args = row, column, reason, remedy
        self.row = row
        self.column = column
        self.reason = reason


class MissingColumnError(SchemaError):
    """A column of the feature spec that rows lack.

    Attributes:
        column: Name of the column.
        row: Index of the first row that lacks it, from 0; None if all rows do.
    """

    reason = "the column is missing"

    def __init__(self, what: str, remedy: str, column: str, row: int | None = None) -> None:
        super().__init__(what, remedy)
        self.args = what, remedy, column, row
        self.column = column
        self.row = row


def no_such_key(row: int, column: str) -> MissingColumnError:
    """Return the error for a dict without a column."""
    return MissingColumnError(
        f"row {row} has no column {column}", "a missing value is null", column, row
    )


@contextlib.contextmanager
def name_fitted_spec() -> Iterator[None]:
    """Say in errors about a file that the spec whose keys they name is that of a workflow."""
    try:
        yield
    except (BadInputError, SchemaError) as error:
        error.remedy = say_fitted(error.remedy)
        error.args = error.what, error.remedy
        raise


def say_fitted(remedy: str) -> str:
    """Add to a remedy that names keys of the spec when they take effect."""
    return f"{remedy}{_LATER}" if "the spec" in remedy else remedy


def add_remedy(error: InvalidRowError, spec: FeatureSpec) -> InvalidRowError:
    """Return the error of a value in rows in memory, with what to do about it."""
    for read in spec.read_plan(label=False).reads:
        remedy = _remedy(error.reason, read) if read.source == error.column else ""
        if remedy:
            return InvalidRowError(error.row, error.column, error.reason, remedy)
    return error


def _remedy(reason: str, read: Read) -> str:
    """Return what to do about a value of a column, by the message about it.

    "" if the reason is not one of the column's messages.
    """
    if reason.endswith(NOT_A_LIST):
        return "pass a list of its values"
    kind = RAW_TYPES[read.raw]
    if reason.endswith(kind.range_message):  # first: labels and booleans have one message for both
        return say_fitted(value_remedy(read, base.RANGE))
    if reason.endswith(kind.syntax):
        instead = f"{kind.syntax.replace('expected', 'pass', 1)} (null)"
        if kind.is_text:  # no key of the spec takes numbers for texts
            return instead
        return f"{instead}, or {say_fitted(value_remedy(read, base.SYNTAX))}"
    for code in (base.EMPTY_ITEM, base.NULL_ITEM):  # in memory, both are a missing item
        if reason.endswith(base.MESSAGES[code]):
            return say_fitted(value_remedy(read, base.NULL_ITEM))
    return ""
