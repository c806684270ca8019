"""Where the files are in the output directory of the ETL, ``OUT``, for programs that read them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from clicklog.errors import BadInputError
from clicklog.files.atomic import read_json
from clicklog.files.validation import parse

#: What a run leaves in its output directory, the last one written last.
NAMES = (
    "criteo_binary", "workflow", "extension", "rejected", "report.html", "timings.json",
    "manifest.json",
)  # fmt: skip
#: Exists while the output is switched to a new generation; it lists the renames of the switch.
SWITCH_FILE = ".switching.json"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Part:
    """A parquet file of a split.

    Attributes:
        file: its path below the directory of the splits.
        day: the day that its rows are of.
        generation: the generation of the workflow that encoded it.
        rows: how many rows it has.
    """

    file: str
    day: int
    generation: int
    rows: int


@dataclasses.dataclass(frozen=True)
class _File:
    """What the manifest says of a part."""

    file: str
    rows: int
    bytes: int
    day: int | None = None
    generation: int | None = None


class EtlOutput:
    """An output directory, which need not exist.

    Attributes:
        root: the directory.
        splits: the directory of ``train``, ``valid`` and ``test``.
        workflow: the directory of the saved workflow.
        extension: the directory of what the next extension of the workflow needs to know, beside
            the workflow itself.
        rejected: the directory of the rows that were left out.
        report: the page that shows what the data look like.
        timings: how long the run took.
        manifest: what the run read, did and wrote.
        drift: how days that were added, or compared with it, differ from those before.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.splits = root / "criteo_binary" / "split"
        _, *others = (root / name for name in NAMES)
        self.workflow, self.extension, self.rejected, self.report, *last = others
        self.timings, self.manifest = last
        self.drift = root / "drift"

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

    def parts(self, split: str) -> list[Part]:
        """Return the parts of a split with their days, in the order of their numbers.

        Raises:
            BadInputError: the manifest is missing or damaged, or was written before manifests
                named the days of the parts.
        """
        found = []
        for file in self.manifest_value("files", list[_File]):
            if not file.file.startswith(f"{split}/"):
                continue
            if file.day is None:
                raise BadInputError(
                    f"{self.manifest}: does not say which day {file.file} is of",
                    "run the ETL again: this manifest was written before days could be chosen",
                )
            found.append(Part(file.file, file.day, file.generation or 0, file.rows))
        return found

    def check_whole(self) -> None:
        """Check that the output is not between two generations.

        Raises:
            BadInputError: the switch to a new generation was interrupted, or is under way.
        """
        if (self.root / SWITCH_FILE).exists():
            raise BadInputError(
                f"{self.root}: the switch to a new generation has begun and not ended",
                "wait for `python -m etl extend` if it is running; else finish it with "
                f"`python -m etl extend --output_path {self.root} --input_path DAY --resume`",
            )
