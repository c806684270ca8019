"""Where the files are in the output directory of the ETL, ``OUT``, for programs that read them."""

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

#: What a run leaves in its output directory; the manifest is written last.
NAMES = (
    "criteo_binary", "workflow", "extension", "rejected", "report.html", "timings.json",
    "manifest.json",
)  # fmt: skip
#: Exists while the output is switched to a new generation; it lists the renames of the switch.
SWITCH_FILE = ".switching.json"
#: The generation before the newest one, or the one that was taken back, laid out as ``OUT``, until
#: a later one is made.
PREVIOUS = ".previous"
#: What the paths of stores have in them: of the events of histories, and of vectors.
_STORES = (f"/{HISTORIES}/", f"/{VECTORS}/")


class EtlOutput:
    """An output directory, which need not exist.

    Attributes:
        root: The directory.
        splits: The directory of ``train``, ``valid`` and ``test``.
        workflow: The directory of the saved workflow.
        extension: The directory of what the next extension of the workflow needs to know, beside
            the workflow itself.
        rejected: The directory of the rows that were left out.
        report: The page that shows what the data look like.
        timings: How long the run took.
        manifest: What the run read, did and wrote.
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
        """Return the output whose splits are in ``directory``, if the ETL wrote them there."""
        return cls(Path(directory).absolute().parent.parent)

    def parts(self, split: str) -> list[PartFile]:
        """Return the parts of a split with their days, in the order of their numbers.

        Raises:
            BadInputError: The manifest is missing or damaged.
            SchemaError: Another version of this program wrote the manifest.
        """
        return [part for part in Manifest.read(self.manifest).files if part.split == split]

    def list_described(self, before: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
        """Return the entries for the manifest's ``described``.

        Args:
            before: The entries of the generation before. Its stores are linked, and not read
                again.
        """
        files = []
        for path in sorted(self.splits.rglob("*")):
            if path.is_file() and path.suffix != ".parquet":
                files.append(path)
        files += self.extension.glob("*.json")  # there is none for NVTabular's own operators
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
        """Compare files with the digests in the manifest, and so with all that they list.

        The manifest has its own digest. It lists the files that describe the parts, the stores of
        histories and vectors, the description of the workflow, which lists its own files and the
        state of its events, and the state of the extension. So all of them are of one run.

        Args:
            manifest: What was written.
            remedy: What to do about a difference.
            below: Compare only files below this directory of the output, with "/" at its end; "":
                all files.
            stores: Whether the stores of histories and vectors are read, too; else only their sizes
                are compared, as for parts.

        Raises:
            BadInputError: One differs, or cannot be read; ``remedy`` says what to do about that.
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

        from nvt_torchrec.base.parquet.footer import footer_digest  # compiles loops

        path = self.splits / part.file
        try:
            size = path.stat().st_size
            if size != part.bytes:
                return f"{path}: {size} bytes instead of {part.bytes}"
            if footer_digest(path) != part.footer:
                return f"{path}: its footer is not what was written (its digest differs)"
        except (OSError, pa.ArrowException) as error:
            return f"{path}: cannot be read: {error}"
        return ""

    def check_whole(self) -> None:
        """Check that the output is not between two generations.

        Raises:
            BadInputError: The switch to a new generation was interrupted, or is under way.
        """
        if (self.root / SWITCH_FILE).exists():
            raise BadInputError(
                f"{self.root}: the switch to a new generation has begun and not ended",
                "wait for `python -m etl extend` if it is running; else finish it with "
                f"`python -m etl extend --output_path {self.root} --resume`",
            )


def _is_store_file(name: str) -> bool:
    """Return whether a file of an output is one of a store, which never changes."""
    return any(store in name for store in _STORES)


def find_part(part: Path, then: os.stat_result) -> Path | None:
    """Return the path of a part now, also if days were added to its output since it was found.

    `python -m etl extend` may give it another name, in this generation and in :data:`PREVIOUS`:
    all of them are links to one file. ``--undo`` moves what it takes back to :data:`PREVIOUS`.

    Args:
        part: Its path when it was found.
        then: Its status when it was found.

    Returns:
        A path of the same file; None if there is none, or the file was rewritten.
    """
    if _is_same_file(part, then, has_same_name=True):
        return part
    output = EtlOutput.from_splits(part.parent.parent)
    parts = output.splits.relative_to(output.root) / "*" / "*.parquet"
    # In the order in which a switch moves files, each directory listed only when it is its turn: so
    # a file that is moved meanwhile is found in one of them.
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
