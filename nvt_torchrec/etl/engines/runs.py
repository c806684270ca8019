"""What fitting has counted so far, durable on disk: runs, each over some consecutive blocks.

A run is one uncompressed ``.npz`` file, ``<first block>-<end block>.npz``, written beside and
renamed; a thread of its own waits for the disk, while others count. :data:`FAN_IN` neighbours that
are complete are merged into one file and then deleted, and so on with those, so that neither the
number of files nor their size grows with the log, but with the vocabulary. Which blocks a run is
over is its name: if the program dies between writing a merged run and deleting what went into it,
the larger run counts and the smaller ones are deleted. So runs need no records of their own; the
directory's journal (:mod:`base.files.journal`) holds what they depend on.

Which runs are merged depends on when the disk was done with them. So whatever depends on the order
of additions, as the moments do, is kept block by block and added up at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import threading
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_parts
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import atomic_path, deferred, delete, remove_temporary
from nvt_torchrec.base.files.journal import Journal
from nvt_torchrec.base.files.mapping import HEADERS
from nvt_torchrec.base.files.syncing import Syncer
from nvt_torchrec.etl.units.counting import Counts, merge

#: How many neighbouring runs are merged into one.
FAN_IN = 8
_NAME = re.compile(r"(\d+)-(\d+)\.npz")


@dataclasses.dataclass
class SortedRun:
    """What was counted in consecutive blocks.

    Attributes:
        rows: The number of well-formed rows.
        nulls: int64 [vocabularies], rows in which a single-hot column was missing.
        moments: float64 [blocks, dense columns, 4], see :func:`etl.units.counting.compute_moments`.
        counts: The counts per vocabulary; an iterator, where they are made as they are written.
    """

    rows: int
    nulls: np.ndarray
    moments: np.ndarray
    counts: Iterable[Counts]


def write_run(path: Path, run: SortedRun) -> None:
    """Write a run; its counts are taken one by one. Raises :class:`OutputError`."""
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:

        def add(name: str, array: np.ndarray) -> None:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)

        add("rows", np.array(run.rows))
        add("nulls", run.nulls)
        add("moments", run.moments)
        for v, column in enumerate(run.counts):
            maximum = column.counts.max(initial=0)  # mostly few: a byte each instead of eight
            add(f"counts_{v}", column.counts.astype(np.min_scalar_type(maximum)))
            if isinstance(column.values, pa.Array):
                offsets, text = string_parts(column.values)
                add(f"offsets_{v}", offsets - offsets[0])
                add(f"text_{v}", text[offsets[0] : offsets[-1]])
            else:
                add(f"values_{v}", column.values)


def run_name(begin: int, end: int) -> str:
    """Return the name of the file of a run over blocks ``begin`` to ``end`` - 1."""
    return f"{begin}-{end}.npz"


class RunFile:
    """A run on disk. Its methods raise :class:`BadInputError` if the file is damaged.

    They may be called by several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Since Python 3.12 a ZipFile opens an entry by a seek from where another thread may be.
        self._reading = threading.Lock()

    @functools.cached_property
    def _archive(self) -> zipfile.ZipFile:
        """The open archive: a run of many vocabularies has thousands of entries."""
        return zipfile.ZipFile(self.path)

    @contextlib.contextmanager
    def _damaged(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise BadInputError(
                f"{self.path}: damaged: {error}", "delete this file and run again"
            ) from error

    def _read(self, name: str) -> np.ndarray:
        with self._reading:
            file = io.BytesIO(self._archive.read(f"{name}.npy"))
        np.lib.format.read_magic(file)
        with HEADERS:
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return np.frombuffer(file.getbuffer()[file.tell() :], dtype).reshape(shape)

    def array(self, name: str) -> np.ndarray:
        """Read ``rows``, ``nulls`` or ``moments``; see :class:`SortedRun`."""
        with self._damaged():
            return self._read(name)

    def counts(self, vocabulary: int) -> Counts:
        """Read the counts of one vocabulary; the others are not read."""
        with self._damaged():
            counts = self._read(f"counts_{vocabulary}").astype(np.int64)
            if f"values_{vocabulary}.npy" in self._archive.NameToInfo:
                return Counts(self._read(f"values_{vocabulary}"), counts)
            buffers = [self._read(f"{name}_{vocabulary}") for name in ("offsets", "text")]
        values = pa.LargeStringArray.from_buffers(len(counts), *map(pa.py_buffer, buffers))
        return Counts(values, counts)


class Runs:
    """The runs in a directory. Its methods may be called by several threads.

    Use it as a context manager: at the end all runs that were added are durable. Its methods and
    the end of the context raise :class:`OutputError` if the directory cannot be written.

    Args:
        directory: The directory, which is created if it does not exist; runs of another key in it
            are deleted.
        blocks: How many blocks there are.
        vocabularies: How many vocabularies there are.
        key: A digest of everything the counts depend on.
        ahead: How many runs may wait for the disk, see :class:`base.files.syncing.Syncer`.
    """

    def __init__(
        self, directory: Path, blocks: int, vocabularies: int, key: str, ahead: int = 2
    ) -> None:
        self._directory = directory
        self._blocks, self._vocabularies = blocks, vocabularies
        self._lock = threading.Lock()
        self._merging: set[tuple[int, int]] = set()
        self._ranges = self._recover(key)
        self._syncer = Syncer(self._note, ahead)

    def __enter__(self) -> Self:
        self._syncer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._syncer.__exit__(*error)

    def _recover(self, key: str) -> set[tuple[int, int]]:
        """Return the blocks of the runs there are; delete those of another key and those merged."""
        journal = Journal(self._directory)
        before = None
        with contextlib.suppress(BadInputError):
            before = journal.read_plan(dict[str, str], "")
        remove_temporary(self._directory)
        files = [path for path in self._directory.glob("*.npz") if _NAME.fullmatch(path.name)]
        if before != {"key": key}:
            for path in files:
                delete(path)
            journal.begin({"key": key})
            return set()
        ranges = []
        for path in files:
            begin, end = path.stem.split("-")
            ranges.append((int(begin), int(end)))
        # Ranges are nested or apart. Of those with the same begin the longest comes first, so a
        # range that begins before the end of the last one kept was merged into it.
        kept: set[tuple[int, int]] = set()
        end_of_kept = 0
        for blocks in sorted(ranges, key=lambda blocks: (blocks[0], -blocks[1])):
            if blocks[0] < end_of_kept:
                delete(self._path(blocks))
            else:
                kept.add(blocks)
                end_of_kept = blocks[1]
        return kept

    def _path(self, blocks: tuple[int, int]) -> Path:
        return self._directory / run_name(*blocks)

    @property
    def missing(self) -> list[int]:
        """Blocks that are in no run."""
        done: set[int] = set()
        for begin, end in self._ranges:
            done |= set(range(begin, end))
        return [block for block in range(self._blocks) if block not in done]

    @property
    def files(self) -> list[RunFile]:
        """All runs, in the order of their blocks, once all that was added is durable."""
        self._syncer.wait()
        return [RunFile(self._path(blocks)) for blocks in sorted(self._ranges)]

    @property
    def rows(self) -> int:
        """The rows of all runs."""
        return sum(int(file.array("rows")) for file in self.files)

    def add(self, block: int, run: SortedRun) -> None:
        """Write a block's counts, which become durable soon; merge runs that are complete."""
        self._write((block, block + 1), run)
        self.compact()

    def compact(self) -> None:
        """Merge complete groups of durable runs, unless another thread merges them."""
        while (group := self._take_group()) is not None:
            self._write((group[0][0], group[-1][1]), self._merge(group))

    def _merge(self, group: list[tuple[int, int]]) -> SortedRun:
        """Merge runs; the counts of a vocabulary are merged when they are written."""
        files = [RunFile(self._path(blocks)) for blocks in group]

        def merge_counts() -> Iterator[Counts]:
            for vocabulary in range(self._vocabularies):
                yield merge(file.counts(vocabulary) for file in files)

        return SortedRun(
            rows=sum(int(file.array("rows")) for file in files),
            nulls=np.sum([file.array("nulls") for file in files], axis=0),
            moments=np.concatenate([file.array("moments") for file in files]),
            counts=merge_counts(),
        )

    def _write(self, blocks: tuple[int, int], run: SortedRun) -> None:
        with deferred() as written:
            write_run(self._path(blocks), run)
        self._syncer.add(written, blocks)

    def _note(self, durable: list[tuple[int, int]]) -> None:
        """Add runs that are durable now; delete those that were merged into them."""
        for begin, end in durable:
            with self._lock:
                merged = {blocks for blocks in self._ranges if begin <= blocks[0] < end}
                self._ranges -= merged
                self._ranges.add((begin, end))
                self._merging.discard((begin, end))
            for blocks in merged:
                delete(self._path(blocks))

    def _take_group(self) -> list[tuple[int, int]] | None:
        """Return neighbours that are complete, for this thread to merge; None without."""
        with self._lock:
            for begin, end in sorted(self._ranges):
                size = end - begin
                first = begin - begin % (size * FAN_IN)
                parent = (first, first + size * FAN_IN)
                group = [(start, start + size) for start in range(*parent, size)]
                if parent not in self._merging and self._ranges.issuperset(group):
                    self._merging.add(parent)
                    return group
        return None
