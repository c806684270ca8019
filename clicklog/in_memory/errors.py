"""Errors about rows in memory. They derive from the errors of :mod:`base.errors`."""

from __future__ import annotations

from nvt_torchrec.base.errors import BadRowError, SchemaError

#: The message for a value of a list column that is no list.
NOT_A_LIST = "expected a list or a missing value"


class InvalidRowError(BadRowError):
    """A value that does not fit its column.

    Attributes:
        row: Index of the row, from 0.
        column: Name of the column.
        reason: The value, and what the column accepts.
        remedy: What to pass instead, and which key of the spec would take the value; "" if neither
            is known.
    """

    def __init__(self, row: int, column: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"row {row}, column {column}: {reason}", remedy)
        self.args = row, column, reason, remedy
        self.row, self.column, self.reason = row, column, reason


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
        self.column, self.row = column, row


def no_such_key(row: int, column: str) -> MissingColumnError:
    """Return the error for a dict without a column."""
    return MissingColumnError(
        f"row {row} has no column {column}", "a missing value is null", column, row
    )
