"""What tests of ``python -m etl check`` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from nvt_torchrec.etl.check.check_files import ERROR, NOTE, Finding
from nvt_torchrec.etl.commands.check import check


def findings(output: Path) -> list[Finding]:
    """Findings that are not only notes: rows of few columns are equal by chance."""
    return [one for one in check(output, workers=2) if one.severity != NOTE]


def bad(output: Path) -> list[str]:
    """The texts of these findings."""
    return list(map(str, findings(output)))


def only(output: Path, kind: str, severity: str = ERROR) -> str:
    """The one finding there is."""
    found = findings(output)
    assert [(one.severity, one.kind) for one in found] == [(severity, kind)], list(map(str, found))
    assert "\n" not in str(found[0])
    return str(found[0])


def set_value(column: str, row: int, value) -> Callable[[pa.Table], pa.Table]:
    """A function that sets one value of a table."""

    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(column)
        values = table[column].to_pylist()
        values[row] = value
        field = table.schema.field(index)
        if value is None:
            field = field.with_nullable(True)
        return table.set_column(index, field, pa.array(values, field.type))

    return change
