"""The paths of the files in the output directory of the ETL, ``OUT``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import FileEntry, check_digests, check_sizes
from nvt_torchrec.formats.histories import HISTORIES
from nvt_torchrec.formats.manifest import Manifest, PartFile
from nvt_torchrec.formats.vectors import VECTORS
from nvt_torchrec.formats.workflow_description import METADATA_FILE

#: The files and directories that a run leaves in its output directory; the manifest comes last.
NAMES = (
    "criteo_binary", "workflow", "extension", "rejected", "report.html", "timings.json",
    "manifest.json",
)  # fmt: skip
#: Exists while the output is switched to a new generation; it lists the renames of the switch.
SWITCH_FILE = ".switching.json"
#: Holds the previous generation, or the one that ``extend --undo`` took back, until another one is
#: made; laid out like ``OUT``.
PREVIOUS = ".previous"
#: The parts of a path by which files of stores (histories and vectors) are recognized.
_STORES = (f"/{HISTORIES}/", f"/{VECTORS}/")


class EtlOutput:
    """An output directory, which need not exist.

    Attributes:
        root: The directory.
        splits: The directory of ``train``, ``valid`` and ``test``.
        workflow: The directory of the saved workflow.
        extension: The directory of the state that the next extension needs, in addition to the
            workflow itself.
        rejected: The directory of rejected rows.
        report: The page with charts of the data.
        timings: The file with the durations of the run's steps.
        manifest: The record of the inputs, the settings and the files of the run.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.splits = root / "criteo_binary" / "split"
        self.workflow = root / "workflow"
        self.extension = root / "extension"
        self.rejected = root / "rejected"
        self.report = root / "report.html"
        self.timings = root / "timings.json"
        self.manifest = root / "manifest.json"

    @classmethod
    def from_splits(cls, directory: Path | str) -> EtlOutput:
        """Return the output whose splits are in ``directory``, provided that the ETL wrote them."""
        return cls(Path(directory).absolute().parent.parent)

    def parts(self, split: str) -> list[PartFile]:
        """Return the parts of a split, in the order of their numbers.

        Raises:
            BadInputError: The manifest is missing or damaged.
            SchemaError: Another version of this program wrote the manifest.
        """
        return [part for part in Manifest.read(self.manifest).files if part.split == split]

    def list_described(self, before: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
        """List the files that the manifest's ``described`` records, with their digests.

        Args:
            before: The entries of the previous generation. Files of its stores are taken from
                there, not read again: they are linked, and never change.
        """
        files = []
        for path in sorted(self.splits.rglob("*")):
            if path.is_file() and path.suffix != ".parquet":
                files.append(path)
        files += self.extension.glob("*.json")  # none in a run with NVTabular's own operators
        files.append(self.workflow / METADATA_FILE)
        entries = {}
        for path in files:
            name = str(path.relative_to(self.root))
            if _is_store_file(name) and name in before:
                entries[name] = before[name]
            else:
                entries[name] = FileEntry.from_file(path)
        return entries

    def check_described(
        self, manifest: Manifest, remedy: str, *, below: str = "", stores: bool = True
    ) -> None:
        """Check that the described files are those of the run that wrote the manifest.

        The manifest, which has its own digest, lists the files that describe the parts, the stores
        of histories and vectors, the state of the extension, and the description of the workflow.
        The latter lists the workflow's files and the state of its events. So all of them are
        covered.

        Args:
            manifest: The manifest.
            remedy: What to do about a difference.
            below: The directory of the output whose files are checked, ending with "/"; "" for all
                files.
            stores: Whether the digests of stores are checked, too, which reads all of their bytes;
                otherwise only their sizes are.

        Raises:
            BadInputError: A file differs or cannot be read.
        """
        sized: dict[str, FileEntry] = {}
        read: dict[str, FileEntry] = {}
        for name, entry in manifest.described.items():
            if not name.startswith(below):
                continue
            sized[name] = entry
            if stores or not _is_store_file(name):
                read[name] = entry
        check_sizes(self.root, sized, remedy)
        check_digests(self.root, read, remedy)

    def part_difference(self, part: PartFile) -> str:
        """Return how the size or footer of a part differs from what was written; "" if not."""
        import pyarrow as pa

        from nvt_torchrec.base.parquet.footer import compute_footer_digest  # compiles loops

        path = self.splits / part.file
        try:
            size = path.stat().st_size
            if size != part.bytes:
                return f"{path}: {size} bytes instead of {part.bytes}"
            if compute_footer_digest(path) != part.footer:
                return f"{path}: its footer was changed (its digest differs)"
        except (OSError, pa.ArrowException) as error:
            return f"{path}: cannot be read: {error}"
        return ""

    def check_whole(self) -> None:
        """Check that no switch to a new generation is unfinished.

        Raises:
            BadInputError: The switch to a new generation was interrupted, or is under way.
        """
        if (self.root / SWITCH_FILE).exists():
            raise BadInputError(
                f"{self.root}: the switch to a new generation is not finished",
                "wait for `python -m etl extend` if it is running; else finish it with "
                f"`python -m etl extend --output_path {self.root} --resume`",
            )


def _is_store_file(name: str) -> bool:
    """Return whether a file belongs to a store, whose files never change."""
    return any(store in name for store in _STORES)


def find_part(part: Path, then: os.stat_result) -> Path | None:
    """Return the current path of a part, even if days were added to its output since it was found.

    `python -m etl extend` may rename a part, both in the new generation and in :data:`PREVIOUS`;
    all of these names are links to one file. ``--undo`` moves the newest generation to
    :data:`PREVIOUS`.

    Args:
        part: The path of the part when it was found.
        then: The status of the file when it was found.

    Returns:
        A path of the same file; None if it is gone or was rewritten.
    """
    if _is_same_file(part, then, has_same_name=True):
        return part
    output = EtlOutput.from_splits(part.parent.parent)
    parts = output.splits.relative_to(output.root) / "*" / "*.parquet"
    # The order in which a switch moves files. Each directory is listed only when the previous ones
    # have been searched, so a file that is moved meanwhile is found in a later one.
    for directory in ("", ".work/*/discarded", PREVIOUS):
        for path in output.root.glob(str(Path(directory) / parts)):
            if _is_same_file(path, then, has_same_name=False):
                return path
    return None


def _is_same_file(path: Path, then: os.stat_result, *, has_same_name: bool) -> bool:
    """Return whether a file exists and is the one that had this status."""
    try:
        now = path.stat()
    except OSError:
        return False
    if now.st_size != then.st_size:
        return False
    has_same_inode = now.st_ino == then.st_ino
    has_same_time = now.st_mtime_ns == then.st_mtime_ns
    if has_same_name:  # network file systems may invent the inode, and `touch` sets the time
        return has_same_inode or has_same_time
    return has_same_inode and has_same_time
