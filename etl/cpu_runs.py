"""What fitting has counted so far, durable on disk: runs, each over some consecutive blocks.

A run is one uncompressed ``.npz`` file, ``<first block>-<end block>.npz``, written beside and
renamed. :data:`FAN_IN` neighbours that are complete are merged into one file and then deleted, and
so on with those, so that neither the number of files nor their size grows with the log, but with
the vocabulary. Which blocks a run is over is its name: if the program dies between writing a
merged run and deleting what went into it, the larger run counts and the smaller ones are deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from clicklog.errors import BadInputError, OutputError
from clicklog.files import TEMPORARY, atomic_path, write_text
from clicklog.strings import string_parts
from etl.counting import Counts, merge
from etl.moments import merge_moments

FAN_IN = 8
#: Names the blocks and settings that the runs of a directory belong to.
KEY_FILE = "key"
_NAME = re.compile(r"(\d+)-(\d+)\.npz")


@dataclasses.dataclass
class Run:
    """What was counted in consecutive blocks.

    Attributes:
        rows: well-formed rows.
        nulls: int64 [vocabularies], rows in which a single-hot column was missing.
        moments: float64 [dense columns, 4], see :func:`etl.moments.moments`.
        counts: per vocabulary.
    """

    rows: int
    nulls: np.ndarray
    moments: np.ndarray
    counts: list[Counts]


def write_run(
    path: Path, rows: int, nulls: np.ndarray, moments: np.ndarray, counts: Iterable[Counts]
) -> None:
    """Write a run; ``counts`` are taken one by one. Raises :class:`OutputError`."""
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:

        def add(name: str, array: np.ndarray) -> None:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)

        add("rows", np.array(rows))
        add("nulls", nulls)
        add("moments", moments)
        for v, column in enumerate(counts):
            most = column.counts.max(initial=0)  # mostly few: a byte each instead of eight
            add(f"counts_{v}", column.counts.astype(np.min_scalar_type(most)))
            if isinstance(column.values, pa.Array):
                offsets, text = _buffers(column.values)
                add(f"offsets_{v}", offsets)
                add(f"text_{v}", text)
            else:
                add(f"values_{v}", column.values)


def _buffers(values: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets from 0, int64 [n + 1], and the text they cut, uint8."""
    offsets, text = string_parts(values)
    return offsets - offsets[0], text[offsets[0] : offsets[-1]]


class RunFile:
    """A run on disk. Its methods raise :class:`BadInputError` if the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def first_block(self) -> int:
        """Where it begins."""
        return int(self.path.name.split("-")[0])

    @contextlib.contextmanager
    def _open(self) -> Iterator[np.lib.npyio.NpzFile]:
        try:
            with np.load(self.path) as archive:
                yield archive
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise BadInputError(
                f"{self.path}: damaged: {error}", "delete this file and run again with --resume"
            ) from error

    def array(self, name: str) -> np.ndarray:
        """``rows``, ``nulls`` or ``moments``; see :class:`Run`."""
        with self._open() as archive:
            return archive[name]

    def counts(self, vocabulary: int) -> Counts:
        """The counts of one vocabulary; the others are not read."""
        with self._open() as archive:
            counts = archive[f"counts_{vocabulary}"].astype(np.int64)
            if f"values_{vocabulary}" in archive:
                return Counts(archive[f"values_{vocabulary}"], counts)
            buffers = [archive[f"{name}_{vocabulary}"] for name in ("offsets", "text")]
        values = pa.LargeStringArray.from_buffers(len(counts), *map(pa.py_buffer, buffers))
        return Counts(values, counts)


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be deleted: {error.strerror}", "make its directory writable"
        ) from error


class Runs:
    """The runs in a directory. Its methods may be called by several threads.

    Args:
        directory: made if need be; runs of another key in it are deleted.
        blocks: how many blocks there are.
        vocabularies: how many vocabularies there are.
        key: a digest of everything the counts depend on.

    Raises:
        OutputError: the directory cannot be written.
    """

    def __init__(self, directory: Path, blocks: int, vocabularies: int, key: str) -> None:
        self._directory = directory
        self._blocks, self._vocabularies = blocks, vocabularies
        self._lock = threading.Lock()
        self._merging: set[tuple[int, int]] = set()
        self._claim(key)
        self._ranges = self._recover()

    def _claim(self, key: str) -> None:
        key_file = self._directory / KEY_FILE
        with contextlib.suppress(OSError):
            if key_file.read_text(encoding="utf-8") == key:
                return
        for path in (key_file, *self._files()):
            _delete(path)
        write_text(key_file, key)

    def _files(self) -> list[Path]:
        return [path for path in self._directory.glob("*.npz") if _NAME.fullmatch(path.name)]

    def _recover(self) -> set[tuple[int, int]]:
        """The ranges there are, once what is half written or covered by a larger one is gone."""
        for path in self._directory.glob(f".*{TEMPORARY}"):
            _delete(path)
        found = {tuple(map(int, _NAME.fullmatch(path.name).groups())) for path in self._files()}
        kept: set[tuple[int, int]] = set()
        end = 0
        for begin, stop in sorted(found, key=lambda one: (one[0], -one[1])):
            if begin < end:  # ranges are nested or apart
                _delete(self._path((begin, stop)))
            else:
                kept.add((begin, stop))
                end = stop
        return kept

    def _path(self, blocks: tuple[int, int]) -> Path:
        return self._directory / f"{blocks[0]}-{blocks[1]}.npz"

    @property
    def missing(self) -> list[int]:
        """Blocks that are in no run."""
        done = {block for begin, end in self._ranges for block in range(begin, end)}
        return [block for block in range(self._blocks) if block not in done]

    @property
    def files(self) -> list[RunFile]:
        """All runs, in the order of their blocks."""
        return [RunFile(self._path(blocks)) for blocks in sorted(self._ranges)]

    def add(self, block: int, run: Run) -> None:
        """Make a block's counts durable; merge runs that have become complete."""
        one = (block, block + 1)
        write_run(self._path(one), run.rows, run.nulls, run.moments, run.counts)
        with self._lock:
            self._ranges.add(one)
        self.compact()

    def compact(self) -> None:
        """Merge complete groups until there are none (that another thread does not merge)."""
        while (group := self._take_group()) is not None:
            parent = (group[0][0], group[-1][1])
            files = [RunFile(self._path(blocks)) for blocks in group]
            write_run(
                self._path(parent),
                sum(int(file.array("rows")) for file in files),
                sum(file.array("nulls") for file in files),
                merge_moments([file.array("moments") for file in files]),
                self._merged(files),
            )
            with self._lock:
                self._ranges.difference_update(group)
                self._ranges.add(parent)
                self._merging.discard(parent)
            for file in files:
                _delete(file.path)

    def _take_group(self) -> list[tuple[int, int]] | None:
        with self._lock:
            for begin, end in sorted(self._ranges):
                size = end - begin
                first = begin - begin % (size * FAN_IN)
                parent = (first, first + size * FAN_IN)
                group = [(at, at + size) for at in range(*parent, size)]
                if parent not in self._merging and self._ranges.issuperset(group):
                    self._merging.add(parent)
                    return group
        return None

    def _merged(self, files: list[RunFile]) -> Iterator[Counts]:
        for v in range(self._vocabularies):
            yield merge(file.counts(v) for file in files)
