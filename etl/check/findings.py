"""What a check finds."""

from __future__ import annotations

import dataclasses

#: Severities: training on it fails or is wrong; it may be; just to know.
ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of a check's report.

    Attributes:
        severity: :data:`ERROR`, :data:`WARNING` or :data:`NOTE`.
        kind: what is checked, in a word or two; findings alike have the same.
        where: file, and row group, row or column in it.
        what: what is wrong there, with the value.
        remedy: what to do about it.
    """

    severity: str
    kind: str
    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.severity}: {self.where}: {self.what}"
        if self.remedy:
            line += f" -> {self.remedy}"
        return " ".join(line.split())
