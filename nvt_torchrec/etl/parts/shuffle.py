"""Shuffling the rows of the training split in bounded memory.

Row g of the split, counted over its parts in order, moves to position permutation(g): one
permutation of all rows (``full``), or one of each day's (``file``). The order depends on the seed
and the number of rows (of each day), and not on how the parts were cut or made. Parts keep their
names and row counts.

Consecutive parts are a group. Two passes over the groups, each in threads. *Scatter* reads a group
and writes its rows, sorted by the group that they move to, as one file. *Gather* reads what moves
to a group from all those files, puts its rows in order and writes its parts. Groups have about the
same size, which bounds memory, the number of files and the size of single reads for any size of
split. The state on disk is a journal (:mod:`base.files.journal`) and for each group a file
``chunk.<i>``: its rows as Arrow IPC messages by the group that they move to, then where each
begins. The units of the journal are::

    chunk.<i>          the file is there
    scattered          all of them are: the source is not read again
    bucket.<i>         the parts of this group are written
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import atomic_path
from nvt_torchrec.base.files.journal import Journal, refuse_changes
from nvt_torchrec.base.hashing import mix, round_keys
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.parts.parquet import write_part

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

    def once(unit: str, do: Callable[[_Plan, Path, Path, int], float], group: int) -> float:
        """Do the work of a unit, unless it is finished; returns the rows to report."""
        if unit not in finished:
            finished[unit] = do(plan, directory, work, group)
            journal.add({unit: finished[unit]})
        return finished[unit]

    def scatter(group: int) -> float:
        return once(f"chunk.{group}", _scatter, group)

    def gather(group: int) -> float:
        return once(f"bucket.{group}", _gather, group)

    groups = range(len(plan.groups))
    if "scattered" in finished:
        report(plan.rows / 2)
    else:
        for rows in map_in_order(scatter, groups, workers, "shuffle"):
            report(rows)
        journal.add({"scattered": 0})
    for rows in map_in_order(gather, groups, workers, "shuffle"):
        report(rows)
    for group in groups:
        _chunk_file(work, group).unlink(missing_ok=True)


@dataclasses.dataclass
class _Plan:
    """The groups, which depend on the parts' footers; JSON-ready.

    Attributes:
        settings: mode, seed and parts that :func:`shuffle` was called with.
        groups: [first part, last part + 1] each.
    """

    settings: dict[str, Any]
    groups: list[list[int]]

    def __post_init__(self) -> None:
        self.parts = [Part(*part) for part in self.settings["parts"]]
        self.starts = np.cumsum([0] + [part.rows for part in self.parts])
        self.rows = int(self.starts[-1])
        # the first row of each group, and all rows
        self.bounds = self.starts[[begin for begin, _ in self.groups] + [len(self.parts)]]
        self.segments = self._segments()

    def _segments(self) -> list[tuple[int, int, np.ndarray]]:
        """Rows [begin, end) that are permuted among themselves, and the keys."""
        mode, seed = self.settings["mode"], self.settings["seed"]
        if mode == "full":
            return [(0, self.rows, round_keys(seed))]
        segments: list[tuple[int, int, np.ndarray]] = []
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
    """The journal's plan, or a new one: the sizes of lists change when the parts are replaced."""
    plan = journal.plan(_Plan, _RESTART)
    if plan is not None:
        before, now = {"settings": plan.settings}, {"settings": json.loads(json.dumps(task))}
        refuse_changes(before, now, journal.directory, _RESTART)
        return plan
    sizes = []
    for name, rows, _ in task["parts"]:
        footer = _read(source / name, pq.read_metadata)
        if footer.num_rows != rows:
            raise BadInputError(
                f"{source / name}: {footer.num_rows} rows instead of {rows}", _RESTART
            )
        sizes.append(_bytes(footer))
    if bytes_at_once is None:
        bytes_at_once = min(max(_LEAST, math.isqrt(sum(sizes) * _PIECE)), _MOST)
    groups: list[list[int]] = []
    total = 0
    for i, size in enumerate(sizes):
        if not groups or total + size > bytes_at_once:
            groups.append([i, i])
            total = 0
        groups[-1][1] = i + 1
        total += size
    plan = _Plan(task, groups)
    journal.begin(dataclasses.asdict(plan))
    return plan


def _bytes(footer: pq.FileMetaData) -> int:
    """Memory of a part: 4 bytes for each value, and for each list."""
    total = 0
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            total += column.num_values + ("." in column.path_in_schema) * group.num_rows
    return 4 * total


def _scatter(plan: _Plan, source: Path, work: Path, group: int) -> float:
    """Write the rows of a group by the group that they move to; returns half of their number."""
    tables = [
        _read(
            source / part.file,
            lambda path: pq.ParquetFile(path, page_checksum_verification=True).read(
                use_threads=False
            ),
        )
        for part in plan.parts[slice(*plan.groups[group])]
    ]
    begin, end = plan.bounds[group : group + 2].tolist()
    positions = plan.positions(begin, end)
    targets = np.searchsorted(plan.bounds, positions, side="right") - 1
    order = np.argsort(targets.astype(np.uint32), kind="stable")
    batch = _one_batch(
        pa.concat_tables(tables).append_column(
            pa.field("", pa.int64(), nullable=False), to_arrow(positions)
        )
    )
    del tables
    batch = batch.take(to_arrow(order))
    cuts = np.searchsorted(targets[order], np.arange(len(plan.groups) + 1))
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with (
        atomic_path(_chunk_file(work, group)) as temporary,
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
    return (end - begin) / 2


def _gather(plan: _Plan, directory: Path, work: Path, group: int) -> float:
    """Write the parts of a group; returns half of their rows."""
    begin, end = plan.bounds[group : group + 2].tolist()
    schema = _read(directory / plan.parts[plan.groups[group][0]].file, pq.read_schema)
    moving = schema.append(pa.field("", pa.int64(), nullable=False))

    def moved_here(path: Path) -> list[pa.RecordBatch]:
        with open(path, "rb") as file:
            file.seek(8 * (group - len(plan.groups) - 1), os.SEEK_END)
            first, last = np.frombuffer(file.read(16), "<i8").tolist()
            file.seek(first)
            message = file.read(last - first)
            return [pa.ipc.read_record_batch(message, moving)] if message else []

    pieces = [_read(_chunk_file(work, i), moved_here) for i in range(len(plan.groups))]
    table = pa.Table.from_batches(itertools.chain(*pieces), moving)
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
    for part in range(*plan.groups[group]):
        cut = slice(*(plan.starts[part : part + 2] - begin))
        rows = batch.take(to_arrow(order[cut]))
        write_part(pa.Table.from_batches([rows], schema), directory / plan.parts[part].file)
    return (end - begin) / 2


def _chunk_file(work: Path, group: int) -> Path:
    return work / f"chunk.{group}"


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    columns = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (OSError, pa.ArrowException) as error:
        raise BadInputError(f"{path}: cannot be read: {error}", _RESTART) from error


# A keyed pseudo-random permutation of [0, n), evaluated element by element in constant memory.
#
# A Feistel network on pairs (left, right) of numbers below a = ⌈√n⌉ permutes [0, a²); walking along
# its cycle until the result is below n makes it a permutation of [0, n), with hardly ever a second
# step as a² < n + 2√n + 1. Both are from Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
# (CT-RSA 2002). Luby and Rackoff (1988) show that four rounds with random round functions cannot be
# told from a random permutation; here are eight, with a mixing function that is only good.


def permute(begin: int, end: int, n: int, keys: np.ndarray) -> np.ndarray:
    """The images of ``begin … end - 1`` under the permutation of [0, n) that ``keys`` select.

    Args:
        begin, end: 0 ≤ begin ≤ end ≤ n.
        n: size of the domain, below 2**62.
        keys: uint64 [ROUNDS]; see :func:`base.hashing.round_keys`.

    Returns:
        int64 [end - begin].
    """
    side = math.isqrt(max(n - 1, 0)) + 1
    return _permute(begin, end, np.uint64(n), np.uint64(side), keys)


@compiled()
def _permute(begin, end, n, side, keys):
    images = np.empty(end - begin, np.int64)
    for i in range(end - begin):
        x = np.uint64(begin + i)
        while True:
            left, right = x // side, x % side
            for key in keys:
                # a 32-bit hash, scaled to [0, side) by a multiplication
                mixed = ((mix(right ^ key) >> np.uint64(32)) * side) >> np.uint64(32)
                mixed += left
                if mixed >= side:
                    mixed -= side
                left, right = right, mixed
            x = left * side + right
            if x < n:
                break
        images[i] = np.int64(x)
    return images
