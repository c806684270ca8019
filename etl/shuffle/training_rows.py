"""Shuffling the rows of the training split in bounded memory.

Row g of the split, counted over its parts in order, moves to position permutation(g)
(:mod:`etl.shuffle.permutation`): one permutation of all rows (``full``), or one of each day's
(``file``). The order depends on the seed and the number of rows (of each day), and not on how the
parts were cut or made. Parts keep their names and row counts.

Two passes over the files, each in threads. *Scatter* reads chunks of consecutive row groups and
writes each chunk's rows, sorted into buckets, as one file. *Gather* reads one bucket from all those
files, puts its rows in order and writes the parts it covers. A bucket is some consecutive parts.
Chunks and buckets have about the same size, which bounds memory, the number of files and the size
of single reads for any size of split. The state on disk is a journal
(:mod:`base.files.journal`) and for each chunk a file ``chunk.<i>``: the chunk's rows as Arrow
IPC messages by bucket, then where each begins. The units of the journal are::

    chunk.<i>            the file is there
    scattered          all of them are: the source is not read again
    bucket.<i>         the parts of this bucket are written
    shuffled           all parts are
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import atomic_path
from nvt_torchrec.base.files.journal import Journal, refuse_changes
from nvt_torchrec.base.threads import in_order
from nvt_torchrec.etl.parquet import write_part
from nvt_torchrec.etl.shuffle.permutation import permute, round_keys

_RESTART = "run with --restart"
#: Bytes of rows that a thread takes at once: at least, and at most (a part may be larger).
_LEAST, _MOST = 64 << 20, 512 << 20
#: Rows that a thread takes from a file at once should be at least so many bytes.
_PIECE = 64 << 10


@dataclasses.dataclass(frozen=True)
class Part:
    """A parquet file of the training split: path below the split root, rows, and their day."""

    file: str
    rows: int
    day: int


def shuffle(
    directory: Path,
    parts: Sequence[Part],
    *,
    mode: str,
    seed: int,
    work: Path,
    workers: int,
    report: Callable[[float], object] = lambda rows: None,
    bytes_at_once: int | None = None,
) -> None:
    """Write ``parts`` again with their rows shuffled. Another call resumes an interrupted one.

    Memory: for each worker two to three times the larger of ``bytes_at_once`` and the largest part.

    Args:
        directory: the directory the parts' paths begin at; no part is replaced before all have been
            read.
        parts: in order; all of one schema.
        mode: ``full``, or ``file`` to keep the days apart and in order.
        seed: not negative.
        work: a directory for the state, which takes about the space of the rows in memory. The
            caller removes it when the run has finished.
        workers: threads; they do not influence the result.
        report: called with the number of rows done since the last call; their sum is all rows.
        bytes_at_once: bytes of rows that a thread has in memory; None: by the size of the split.

    Raises:
        BadInputError: a part is damaged or has another number of rows.
        OutputError: a directory cannot be written, or holds the state of another shuffle.
    """
    task = {"mode": mode, "seed": seed, "parts": [dataclasses.astuple(part) for part in parts]}
    journal = Journal(work)
    plan = _plan(directory, task, journal, bytes_at_once)
    finished = journal.finished(float)
    if "scattered" not in finished and any(unit.startswith("bucket.") for unit in finished):
        # parts may be replaced already: their rows must not be scattered again
        raise BadInputError(f"{work}: the record that all rows were scattered is damaged", _RESTART)

    def once(unit: str, work: Callable[[], float]) -> float:
        """Do the work of a unit, unless it is finished; returns the rows to report."""
        if unit not in finished:
            finished[unit] = work()
            journal.add({unit: finished[unit]})
        return finished[unit]

    def scatter(chunk: int) -> float:
        return once(f"chunk.{chunk}", lambda: _scatter(plan, directory, work, chunk))

    def gather(bucket: int) -> float:
        return once(f"bucket.{bucket}", lambda: _gather(plan, directory, work, bucket))

    if "shuffled" in finished:
        report(plan.rows)
        return
    if "scattered" in finished:
        report(plan.rows / 2)
    else:
        for rows in in_order(scatter, range(len(plan.chunks)), workers, "shuffle"):
            report(rows)
        journal.add({"scattered": 0})
    for rows in in_order(gather, range(len(plan.buckets)), workers, "shuffle"):
        report(rows)
    journal.add({"shuffled": 0})
    for chunk in range(len(plan.chunks)):
        _chunk_file(work, chunk).unlink(missing_ok=True)


@dataclasses.dataclass
class _Plan:
    """The cut into chunks and buckets, which depends on the parts' footers; JSON-ready.

    Attributes:
        settings: mode, seed and parts that :func:`shuffle` was called with.
        chunks: consecutive row groups: [part, row group, first row, rows] each.
        buckets: consecutive parts: [first part, last part + 1].
    """

    settings: dict[str, Any]
    chunks: list[list[list[int]]]
    buckets: list[list[int]]

    def __post_init__(self) -> None:
        self.parts = [Part(*part) for part in self.settings["parts"]]
        self.starts = np.cumsum([0] + [part.rows for part in self.parts])
        self.rows = int(self.starts[-1])
        # the first row of each bucket, and all rows
        self.bounds = self.starts[[begin for begin, _ in self.buckets] + [len(self.parts)]]
        self.segments = self._segments()

    def _segments(self) -> list[tuple[int, int, np.ndarray]]:
        """Rows [begin, end) that are permuted among themselves, and the keys."""
        mode, seed = self.settings["mode"], self.settings["seed"]
        if mode == "full":
            return [(0, self.rows, round_keys(seed))]
        segments = []
        for i, part in enumerate(self.parts):
            begin = int(self.starts[i])
            if i and part.day == self.parts[i - 1].day:
                begin = segments.pop()[0]
            segments.append((begin, int(self.starts[i + 1]), round_keys(seed, 1 + part.day)))
        return segments

    def positions(self, begin: int, end: int) -> np.ndarray:
        """Where rows [begin, end) go: int64 [end - begin]."""
        pieces = [np.empty(0, np.int64)]
        for first, last, keys in self.segments:
            low, high = max(begin, first), min(end, last)
            if low < high:
                pieces.append(first + permute(low - first, high - first, last - first, keys))
        return np.concatenate(pieces)


def _plan(source: Path, task: dict, journal: Journal, bytes_at_once: int | None) -> _Plan:
    """The journal's plan, or a new one. Row groups' sizes change when the parts are replaced."""
    plan = journal.plan(_Plan, _RESTART)
    if plan is not None:
        before, now = {"settings": plan.settings}, {"settings": json.loads(json.dumps(task))}
        refuse_changes(before, now, journal.directory, _RESTART)
        return plan
    groups = []  # part, row group, first row, rows, bytes
    sizes = []  # of parts
    for i, (name, rows, _) in enumerate(task["parts"]):
        footer = _read(source / name, pq.read_metadata)
        if footer.num_rows != rows:
            raise BadInputError(
                f"{source / name}: {footer.num_rows} rows instead of {rows}",
                _RESTART,
            )
        of_file, row = [], 0
        for j in range(footer.num_row_groups):
            group = footer.row_group(j)
            of_file.append([i, j, row, group.num_rows, _bytes(group)])
            row += group.num_rows
        groups += of_file
        sizes.append(sum(group[-1] for group in of_file))
    if bytes_at_once is None:
        bytes_at_once = min(max(_LEAST, math.isqrt(sum(sizes) * _PIECE)), _MOST)
    chunks = _consecutive(groups, [group[-1] for group in groups], bytes_at_once)
    buckets = _consecutive(range(len(sizes)), sizes, bytes_at_once)
    plan = _Plan(
        task,
        [[group[:4] for group in chunk] for chunk in chunks],
        [[bucket[0], bucket[-1] + 1] for bucket in buckets],
    )
    journal.begin(dataclasses.asdict(plan))
    return plan


def _bytes(group: pq.RowGroupMetaData) -> int:
    """Memory of a row group: 4 bytes for each value, and for each list."""
    columns = [group.column(i) for i in range(group.num_columns)]
    lists = sum("." in column.path_in_schema for column in columns)
    return 4 * (sum(column.num_values for column in columns) + lists * group.num_rows)


def _consecutive(items: Iterable, sizes: list[int], limit: int) -> list[list]:
    """Cut items into lists with sizes of up to ``limit``; a larger item has a list of its own."""
    lists, total = [], 0
    for item, size in zip(items, sizes, strict=True):
        if not lists or total + size > limit:
            lists.append([])
            total = 0
        lists[-1].append(item)
        total += size
    return lists


def _scatter(plan: _Plan, source: Path, work: Path, chunk: int) -> float:
    """Write the rows of a chunk by bucket; returns half of their number."""
    groups = plan.chunks[chunk]
    rows = sum(group[3] for group in groups)
    tables = []
    for part in sorted({group[0] for group in groups}):
        indices = [group[1] for group in groups if group[0] == part]
        tables.append(
            _read(
                source / plan.parts[part].file,
                lambda path, indices=indices: pq.ParquetFile(
                    path, page_checksum_verification=True
                ).read_row_groups(indices, use_threads=False),
            )
        )
    begin = int(plan.starts[groups[0][0]]) + groups[0][2]
    positions = plan.positions(begin, begin + rows)
    buckets = np.searchsorted(plan.bounds, positions, side="right") - 1
    order = np.argsort(buckets.astype(np.uint32), kind="stable")
    batch = _one_batch(
        pa.concat_tables(tables).append_column(
            pa.field("", pa.int64(), nullable=False), to_arrow(positions)
        )
    )
    del tables
    batch = batch.take(to_arrow(order))
    cuts = np.searchsorted(buckets[order], np.arange(len(plan.buckets) + 1))
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with (
        atomic_path(_chunk_file(work, chunk)) as temporary,
        pa.OSFile(str(temporary), "wb") as file,
    ):
        stream = pa.ipc.new_stream(file, batch.schema, options=options)
        stream.write_batch(batch.slice(0, 0))  # takes the schema with it
        offsets = [file.tell()]
        for first, last in itertools.pairwise(cuts):
            if first < last:
                stream.write_batch(batch.slice(first, last - first))
            offsets.append(file.tell())
        stream.close()
        file.write(np.array(offsets, "<i8").tobytes())
    return rows / 2


def _gather(plan: _Plan, directory: Path, work: Path, bucket: int) -> float:
    """Write the parts of a bucket; returns half of their rows."""
    begin, end = int(plan.bounds[bucket]), int(plan.bounds[bucket + 1])
    parts = range(*plan.buckets[bucket])
    schema = _read(directory / plan.parts[parts[0]].file, pq.read_schema)
    moving = schema.append(pa.field("", pa.int64(), nullable=False))
    pieces = [_piece(plan, work, chunk, bucket, moving) for chunk in range(len(plan.chunks))]
    table = pa.Table.from_batches([piece for piece in pieces if piece], moving)
    del pieces
    positions = np.concatenate([np.empty(0, np.int64), *map(to_numpy, table[""].chunks)])
    order = np.full(end - begin, -1)
    order[positions - begin] = np.arange(len(positions))
    if len(positions) != end - begin or (order < 0).any():
        raise BadInputError(
            f"{work}: {len(positions)} rows for the {end - begin} from row {begin}",
            "files were changed while this ran; run with --restart",
        )
    batch = _one_batch(table.select(schema.names))
    del table
    for part in parts:
        cut = slice(*(plan.starts[part : part + 2] - begin))
        rows = batch.take(to_arrow(order[cut]))
        write_part(pa.Table.from_batches([rows], schema), directory / plan.parts[part].file)
    return (end - begin) / 2


def _piece(
    plan: _Plan, work: Path, chunk: int, bucket: int, schema: pa.Schema
) -> pa.RecordBatch | None:
    """The rows of a chunk that go to a bucket; None if there are none."""

    def read(path: Path) -> pa.RecordBatch | None:
        with open(path, "rb") as file:
            index = 8 * (len(plan.buckets) + 1 - bucket)
            file.seek(-index, os.SEEK_END)
            first, last = np.frombuffer(file.read(16), "<i8").tolist()
            file.seek(first)
            return (
                pa.ipc.read_record_batch(file.read(last - first), schema) if first < last else None
            )

    return _read(_chunk_file(work, chunk), read)


def _chunk_file(work: Path, chunk: int) -> Path:
    return work / f"chunk.{chunk}"


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    columns = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (OSError, pa.ArrowException) as error:
        raise BadInputError(f"{path}: cannot be read: {error}", _RESTART) from error
