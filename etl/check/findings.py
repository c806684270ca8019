"""The findings of a check."""

from __future__ import annotations

import dataclasses

#: Severities: training fails or is wrong; training may be wrong; for information only.
ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of a check's report.

    Attributes:
        severity: :data:`ERROR`, :data:`WARNING` or :data:`NOTE`.
        kind: The kind of the finding, in one or two words; similar findings share it.
        where: The file, and the row group, row or column in it.
        what: What is wrong there, with the value.
        remedy: What to do about it.
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
