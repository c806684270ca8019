"""Where the files are in the output directory of the ETL, ``OUT``, for programs that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from clicklog.files.atomic import read_json
from clicklog.files.validation import parse

#: What a run leaves in its output directory, the last one written last.
NAMES = (
    "criteo_binary", "workflow", "extension", "rejected", "report.html", "timings.json",
    "manifest.json",
)  # fmt: skip
T = TypeVar("T")


class EtlOutput:
    """An output directory, which need not exist.

    Attributes:
        splits: the directory of ``train``, ``valid`` and ``test``.
        workflow: the directory of the saved workflow.
        extension: the directory of what the next extension of the workflow needs to know, beside
            the workflow itself.
        rejected: the directory of the rows that were left out.
        report: the page that shows what the data look like.
        timings: how long the run took.
        manifest: what the run read, did and wrote.
    """

    def __init__(self, root: Path) -> None:
        self.splits = root / "criteo_binary" / "split"
        _, *others = (root / name for name in NAMES)
        self.workflow, self.extension, self.rejected = others[:3]
        self.report, self.timings, self.manifest = others[3:]

    @classmethod
    def of_splits(cls, directory: Path | str) -> EtlOutput:
        """The output whose splits are in ``directory``, if the ETL wrote them there."""
        return cls(Path(directory).absolute().parent.parent)

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
