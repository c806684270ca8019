"""Errors about rows to be scored. They derive from the errors of :mod:`base.errors`."""

from __future__ import annotations

from nvt_torchrec.base.errors import BadRowError, SchemaError


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
