"""Durable partial counts of a fit: runs, each of which has the counts of consecutive blocks.

A run is one uncompressed ``.npz`` file, ``<first block>-<end block>.npz``, written to a temporary
file and renamed; a separate thread waits for the disk, while others count. :data:`FAN_IN` complete
neighbours are merged into one file and deleted; merged runs are merged again in the same way. So
the size of all files grows with the vocabulary, but not with the log. The name of a run tells its
blocks: if the program dies between writing a merged run and deleting the runs that it contains, the
larger run is used and the smaller ones are deleted. So runs need no separate records; the
directory's journal (:mod:`base.files.journal`) holds a digest of everything they depend on.

Which runs are merged depends on the timing of the disk. So results that depend on the order of
additions, such as moments, are stored for each block and added up at the end.
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

#: The number of neighbouring runs to merge into one.
FAN_IN = 8
_NAME = re.compile(r"(\d+)-(\d+)\.npz")


@dataclasses.dataclass
class SortedRun:
    """The counts of consecutive blocks.

    Attributes:
        rows: The number of well-formed rows.
        nulls: int64 [vocabularies], the number of missing values in single-hot columns.
        moments: float64 [blocks, dense columns, 4], see :func:`etl.units.counting.compute_moments`.
        counts: The counts of each vocabulary; it may be an iterator, so that only one of them is in
            memory while a run is written.
    """

    rows: int
    nulls: np.ndarray
    moments: np.ndarray
    counts: Iterable[Counts]


def write_run(path: Path, run: SortedRun) -> None:
    """Write a run, taking its counts one by one. Raises :class:`OutputError`."""
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:

        def add(name: str, array: np.ndarray) -> None:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)

        add("rows", np.array(run.rows))
        add("nulls", run.nulls)
        add("moments", run.moments)
        for v, column in enumerate(run.counts):
            # Most counts are small: in the smallest sufficient type they take one byte, not eight.
            maximum = column.counts.max(initial=0)
            add(f"counts_{v}", column.counts.astype(np.min_scalar_type(maximum)))
            if isinstance(column.values, pa.Array):
                offsets, text = string_parts(column.values)
                add(f"offsets_{v}", offsets - offsets[0])
                add(f"text_{v}", text[offsets[0] : offsets[-1]])
            else:
                add(f"values_{v}", column.values)


def run_name(begin: int, end: int) -> str:
    """Return the name of the file of a run with blocks ``begin`` to ``end`` - 1."""
    return f"{begin}-{end}.npz"


class RunFile:
    """A run on disk. Thread-safe.

    Its methods raise :class:`BadInputError` if the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Since Python 3.12, opening an entry of a ZipFile seeks in the shared file, which is not
        # safe while another thread reads.
        self._reading = threading.Lock()

    @functools.cached_property
    def _archive(self) -> zipfile.ZipFile:
        """The open archive, kept open because its directory may have thousands of entries."""
        return zipfile.ZipFile(self.path)

    @contextlib.contextmanager
    def _explain_damage(self) -> Iterator[None]:
        """Turn errors of reading into :class:`BadInputError`."""
        try:
            yield
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise BadInputError(
                f"{self.path}: damaged: {error}", "delete this file and run again"
            ) from error

    def _read(self, name: str) -> np.ndarray:
        """Read an array of the archive."""
        with self._reading:
            file = io.BytesIO(self._archive.read(f"{name}.npy"))
        np.lib.format.read_magic(file)
        with HEADERS:
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return np.frombuffer(file.getbuffer()[file.tell() :], dtype).reshape(shape)

    def array(self, name: str) -> np.ndarray:
        """Read ``rows``, ``nulls`` or ``moments``; see :class:`SortedRun`."""
        with self._explain_damage():
            return self._read(name)

    def counts(self, vocabulary: int) -> Counts:
        """Read the counts of one vocabulary only."""
        with self._explain_damage():
            counts = self._read(f"counts_{vocabulary}").astype(np.int64)
            if f"values_{vocabulary}.npy" in self._archive.NameToInfo:
                return Counts(self._read(f"values_{vocabulary}"), counts)
            offsets = self._read(f"offsets_{vocabulary}")
            text = self._read(f"text_{vocabulary}")
        values = pa.LargeStringArray.from_buffers(
            len(counts), pa.py_buffer(offsets), pa.py_buffer(text)
        )
        return Counts(values, counts)


class Runs:
    """The runs in a directory. Thread-safe.

    Use it as a context manager: at the end of the context, all added runs are durable. Its methods
    and the end of the context raise :class:`OutputError` if the directory cannot be written.

    Args:
        directory: The directory, which is created if it does not exist; its runs with another key
            are deleted.
        blocks: The number of blocks.
        vocabularies: The number of vocabularies.
        key: A digest of everything that the counts depend on.
        ahead: How many runs may wait for the disk, see :class:`base.files.syncing.Syncer`.
    """

    def __init__(
        self, directory: Path, blocks: int, vocabularies: int, key: str, ahead: int = 2
    ) -> None:
        self._directory = directory
        self._blocks = blocks
        self._vocabularies = vocabularies
        self._lock = threading.Lock()
        self._merging: set[tuple[int, int]] = set()
        self._ranges = self._recover(key)
        self._syncer = Syncer(self._add_durable, ahead)

    def __enter__(self) -> Self:
        self._syncer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._syncer.__exit__(*error)

    def _recover(self, key: str) -> set[tuple[int, int]]:
        """Return the blocks of the existing runs; delete runs of another key, and merged runs."""
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
        # Ranges are either nested or disjoint. Of ranges with the same begin, the longest is sorted
        # first. So a range that begins before the end of the last kept one was merged into it.
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
        """The blocks that are in no run."""
        done: set[int] = set()
        for begin, end in self._ranges:
            done |= set(range(begin, end))
        return [block for block in range(self._blocks) if block not in done]

    @property
    def files(self) -> list[RunFile]:
        """All runs, in the order of their blocks. Waits until all added runs are durable."""
        self._syncer.wait()
        return [RunFile(self._path(blocks)) for blocks in sorted(self._ranges)]

    @property
    def rows(self) -> int:
        """The number of rows of all runs."""
        return sum(int(file.array("rows")) for file in self.files)

    def add(self, block: int, run: SortedRun) -> None:
        """Write the counts of a block, which become durable soon; merge complete groups of runs."""
        self._write((block, block + 1), run)
        self.compact()

    def compact(self) -> None:
        """Merge complete groups of durable runs that no other thread merges."""
        while (group := self._take_group()) is not None:
            self._write((group[0][0], group[-1][1]), self._merge(group))

    def _merge(self, group: list[tuple[int, int]]) -> SortedRun:
        """Merge runs; the counts of each vocabulary are merged while they are written."""
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
        """Write a run, which the syncer makes durable."""
        with deferred() as written:
            write_run(self._path(blocks), run)
        self._syncer.add(written, blocks)

    def _add_durable(self, durable: list[tuple[int, int]]) -> None:
        """Add runs that have become durable; delete the runs that were merged into them."""
        for begin, end in durable:
            with self._lock:
                merged = {blocks for blocks in self._ranges if begin <= blocks[0] < end}
                self._ranges -= merged
                self._ranges.add((begin, end))
                self._merging.discard((begin, end))
            for blocks in merged:
                delete(self._path(blocks))

    def _take_group(self) -> list[tuple[int, int]] | None:
        """Reserve a complete group of neighbours for this thread to merge; None if there is none.

        A group has :data:`FAN_IN` runs of equal size, aligned to a multiple of their total size.
        """
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
