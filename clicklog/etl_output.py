"""Where the files are in the output directory of the ETL, ``OUT``, for programs that read them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from clicklog.files.atomic import read_json
from clicklog.files.validation import parse

#: What a run leaves in its output directory, the last one written last.
NAMES = ("criteo_binary", "workflow", "rejected", "report.html", "timings.json", "manifest.json")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class EtlOutput:
    """An output directory, which need not exist.

    Attributes:
        root: its path, ``OUT``.
    """

    root: Path

    @classmethod
    def of_splits(cls, directory: Path | str) -> EtlOutput:
        """The output whose splits are in ``directory``, if the ETL wrote them there."""
        return cls(Path(directory).absolute().parent.parent)

    @property
    def splits(self) -> Path:
        """The directory of ``train``, ``valid`` and ``test``."""
        return self.root / "criteo_binary" / "split"

    @property
    def workflow(self) -> Path:
        """The directory of the saved workflow."""
        return self.root / "workflow"

    @property
    def manifest(self) -> Path:
        """What was read, done and written; the last file of a run."""
        return self.root / "manifest.json"

    @property
    def report(self) -> Path:
        """The page that shows what the data look like."""
        return self.root / "report.html"

    @property
    def timings(self) -> Path:
        """How long the run took."""
        return self.root / "timings.json"

    @property
    def rejected(self) -> Path:
        """The directory of rows that were left out."""
        return self.root / "rejected"

    def manifest_value(self, key: str, kind: type[T]) -> T:
        """One value of the manifest; the rest of it may be that of another version.

        Args:
            key: its name in the manifest.
            kind: what it must be, see :func:`clicklog.files.validation.parse`.

        Raises:
            BadInputError: the manifest is missing or damaged.
        """
        remedy = "copy the manifest again, or run the ETL again"
        value = read_json(self.manifest, "the ETL's manifest")
        value = parse(dict[str, Any], value, self.manifest, remedy)
        return parse(kind, value.get(key), f"{self.manifest}: {key}", remedy)
