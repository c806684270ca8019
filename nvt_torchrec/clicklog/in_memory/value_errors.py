"""Errors about rows in memory, with remedies.

The errors derive from those of :mod:`base.errors`. The spec of a served workflow is fixed, so a
remedy that names keys of the spec says when they take effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nvt_torchrec.base.errors import BadInputError, BadRowError, SchemaError
from nvt_torchrec.clicklog.text.remedies import suggest_value_remedy
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES, base
from nvt_torchrec.formats.feature_spec.read_plan import Read

#: The message for a value of a list column that is not a list.
NOT_A_LIST = "expected a list or a missing value"
_LATER = "; changes of the spec take effect after another ETL run and training"


class InvalidRowError(BadRowError):
    """A value that does not fit its column, or a row that cannot be scored.

    Attributes:
        row: The index of the row, from 0.
        column: The name of the column; "" if the error is not about one column.
        reason: The value, and what the column accepts.
        remedy: What to pass instead, or which key of the spec would allow the value; "" if neither
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
        column: The name of the column.
        row: The index of the first row that lacks it, from 0; None if all rows do.
    """

    reason = "the column is missing"

    def __init__(self, what: str, remedy: str, column: str, row: int | None = None) -> None:
        super().__init__(what, remedy)
        self.args = what, remedy, column, row
        self.column = column
        self.row = row


def make_missing_key_error(row: int, column: str) -> MissingColumnError:
    """Return the error about a dict that lacks a column."""
    return MissingColumnError(
        f"row {row} has no column {column}", "a missing value is null", column, row
    )


@contextlib.contextmanager
def name_fitted_spec() -> Iterator[None]:
    """Add to the remedies of errors about a file when changes of the (fitted) spec take effect."""
    try:
        yield
    except (BadInputError, SchemaError) as error:
        error.remedy = say_fitted(error.remedy)
        error.args = error.what, error.remedy
        raise


def say_fitted(remedy: str) -> str:
    """Add to a remedy that names keys of the spec when changes take effect."""
    return f"{remedy}{_LATER}" if "the spec" in remedy else remedy


def add_remedy(error: InvalidRowError, spec: FeatureSpec) -> InvalidRowError:
    """Return the error about a value with a remedy, if there is one."""
    for read in spec.read_plan(label=False).reads:
        remedy = _remedy(error.reason, read) if read.source == error.column else ""
        if remedy:
            return InvalidRowError(error.row, error.column, error.reason, remedy)
    return error


def _remedy(reason: str, read: Read) -> str:
    """Return the remedy for a value of a column, by the error message about it.

    "" if the reason is not one of the column's messages.
    """
    if reason.endswith(NOT_A_LIST):
        return "pass a list of its values"
    kind = RAW_TYPES[read.raw]
    if reason.endswith(kind.range_message):  # first, because labels and booleans use it for syntax
        return say_fitted(suggest_value_remedy(read, base.RANGE))
    if reason.endswith(kind.syntax):
        instead = f"{kind.syntax.replace('expected', 'pass', 1)} (null)"
        if kind.is_text:  # no key of the spec allows numbers in a column of strings
            return instead
        return f"{instead}, or {say_fitted(suggest_value_remedy(read, base.SYNTAX))}"
    for code in (base.EMPTY_ITEM, base.NULL_ITEM):  # in memory, both mean a missing item
        if reason.endswith(base.MESSAGES[code]):
            return say_fitted(suggest_value_remedy(read, base.NULL_ITEM))
    return ""
