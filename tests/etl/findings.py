"""What tests of ``python -m etl check`` share."""

from __future__ import annotations

from pathlib import Path

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
