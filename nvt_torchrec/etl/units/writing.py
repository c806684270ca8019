"""Divide the rows of a block into units; write their parts, rejected rows and journal records.

The rule that divides the rows of a block looks at each row alone, so the division depends neither
on the engine nor on how the log is cut into blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import Written, atomic_path, deferred, publish
from nvt_torchrec.base.files.journal import Journal
from nvt_torchrec.base.files.syncing import Syncer
from nvt_torchrec.base.hashing import mix
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.clicklog.text.assemble import take
from nvt_torchrec.etl.state.output import PARTS, REJECTED
from nvt_torchrec.etl.units.part_files import PartWriter
from nvt_torchrec.etl.units.unit_plan import DividedBlock, Unit
from nvt_torchrec.formats.rows import WORD_BITS, RawRows
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.vectors import NO_VECTOR

#: Bad rows that the record of a unit describes; its file of rejected rows has all of them.
MAX_DESCRIBED = 5

#: Encoded rows: the table to write, and the number of out-of-vocabulary ids in each categorical
#: column, int64 [categorical columns].
Encoded: TypeAlias = tuple[pa.Table, np.ndarray]


class LostRowsError(BadInputError):
    """Rows of the input are neither in the parquet nor among the rejected rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitRecord:
    """The result of a unit as stored in JSON, without the unit itself.

    All but ``bad`` are numbers of rows, bytes or ids.

    Attributes:
        rows: Rows written.
        bad_count: Malformed rows left out.
        bad: Line in the unit, from 0, and reason of the first malformed rows.
        positives: Rows written with label 1.
        size: Bytes of the part.
        dense_missing: By dense column, rows without a value.
        null: By categorical column, rows without a value.
        oov: By categorical column, out-of-vocabulary ids.
        drawn: Rows written that are sampled negatives.
        waiting: Rows left out because their clicks may still come.
        done: Rows left out because earlier days have written them.
        no_vector: By vector, rows without one.
    """

    rows: int
    bad_count: int
    bad: list[list[Any]]
    positives: int
    size: int
    dense_missing: list[int]
    null: list[int]
    oov: list[int]
    drawn: int = 0
    waiting: int = 0
    done: int = 0
    no_vector: list[int] = dataclasses.field(default_factory=list)

    def result(self, unit: Unit) -> UnitResult:
        """Return the result of the unit."""
        return UnitResult(unit=unit, **vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitResult(UnitRecord):
    """The result of a unit, with the unit."""

    unit: Unit

    @property
    def lines(self) -> int:
        """The number of rows read."""
        return self.rows - self.drawn + self.bad_count + self.waiting + self.done

    @property
    def has_part(self) -> bool:
        """Whether the unit has a file; a split that gets no row of a divided block has none."""
        return self.size > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form, which :class:`UnitRecord` reads."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(UnitRecord)}


def count_drawn(rows: RawRows) -> int:
    """Count the sampled negatives among rows."""
    return 0 if rows.drawn is None else int(np.count_nonzero(rows.drawn))


def group_by_source(results: list[UnitResult]) -> dict[str, list[UnitResult]]:
    """Group results by input file; each group is in the order of the blocks."""
    sources: dict[str, list[UnitResult]] = {result.unit.block.source: [] for result in results}
    for result in sorted(results, key=lambda result: result.unit.block.begin):
        sources[result.unit.block.source].append(result)
    return sources


def count_missing(mask: np.ndarray, columns: int) -> np.ndarray:
    """Count the missing values of each column.

    Args:
        mask: uint64 [words, n], one bit per column.
        columns: The number of columns.

    Returns:
        int64 [columns].
    """
    counts = np.empty(columns, np.int64)
    for word, begin in zip(mask, range(0, columns, WORD_BITS), strict=False):
        _count_bits(word, counts[begin : begin + WORD_BITS])
    return counts


@compiled()
def _count_bits(mask, counts):
    for bit in range(len(counts)):
        count = np.uint64(0)
        for i in range(len(mask)):  # by index: LLVM does not vectorize a loop over the array itself
            count += (mask[i] >> np.uint64(bit)) & np.uint64(1)
        counts[bit] = count


# ---- the rows of each split


def hash_values(values: np.ndarray, *seed: int) -> np.ndarray:
    """Hash int64 [n] with a seed of non-negative integers; return uint64 [n]."""
    first, second = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    return _hash_words(np.ascontiguousarray(values), first, second)


@compiled()
def _hash_words(values, first, second):
    hashes = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        hashes[i] = mix(mix(np.uint64(values[i]) ^ first) + second)
    return hashes


def choose_splits(rows: RawRows, block: DividedBlock, lines_before: int) -> np.ndarray:
    """Return the split of each row as its index in ``SPLITS``; uint8 [n].

    Args:
        rows: Rows of the block.
        block: The block.
        lines_before: The number of lines of the block before ``rows``.
    """
    rule = block.rule
    if rule.by == "share":
        return rule.choose(_hash_positions(rows, block, lines_before))
    assert rows.key is not None  # the other rules read it
    if rule.by == "column":
        return rule.choose(hash_values(rows.key, rule.seed))
    chosen = rule.choose(rows.key)
    if rule.valid_cut is not None:
        drawn = _hash_positions(rows, block, lines_before) >= np.uint64(rule.valid_cut)
        chosen[(chosen == SPLITS.index("train")) & drawn] = SPLITS.index("valid")
    return chosen


def _hash_positions(rows: RawRows, block: DividedBlock, lines_before: int) -> np.ndarray:
    """Hash the file number and the row number of each row; return uint64 [n]."""
    return hash_values(block.first_row + lines_before + rows.line, block.rule.seed, block.file)


def divide_rows(
    pieces: Iterable[RawRows], block: Block, splits: Sequence[str]
) -> Iterator[tuple[RawRows, ...]]:
    """Yield, for each piece of a block, its rows of each split.

    Bad rows and other rows that are left out are booked to the first split of the block, so that
    each is counted once. ``lines`` of each result is the number of lines of the whole piece.

    Args:
        pieces: All rows of the block, in order.
        block: The block; if it is not divided, its one split gets all rows.
        splits: The splits of the block to yield.

    Raises:
        LostRowsError: The reader lost rows.
    """
    lines = 0
    for rows in pieces:
        num_read = len(rows) - count_drawn(rows)
        left_out = rows.bad_count + rows.waiting + rows.done
        if rows.lines != num_read + left_out:
            raise LostRowsError(
                f"{block.source}, bytes {block.begin} to {block.end}: {rows.lines} lines, "
                f"but {num_read} rows and {left_out} left out",
                "this is a defect of the program, please report it; nothing was written for them",
            )
        if not isinstance(block, DividedBlock):
            yield (rows,)
            continue
        chosen = choose_splits(rows, block, lines)
        by_split = []
        for split in splits:
            taken = take(rows, chosen == SPLITS.index(split))
            if split == block.rule.splits[0]:
                taken = dataclasses.replace(taken, bad=rows.bad, bad_count=rows.bad_count)
            else:
                taken = dataclasses.replace(taken, waiting=0, done=0)
            by_split.append(taken)
        yield tuple(by_split)
        lines += rows.lines


# ---- the files of a unit, and its record


def write_units(
    units: Sequence[Unit],
    pieces: Iterable[RawRows],
    encode: Callable[[RawRows], Encoded],
    work: Path,
) -> tuple[list[UnitResult], list[Written]]:
    """Write the parts and rejected rows of the units of one block, in one pass over its rows.

    Args:
        units: Some or all units of the block.
        pieces: All rows of the block in order, in one or more pieces. The pieces may be produced
            lazily; if that raises, no file is left.
        encode: Encodes rows of one split.
        work: The directory of the run's state, which holds the parts.

    Returns:
        The results, for :func:`record`, and the files, for :func:`base.files.atomic.publish`.

    Raises:
        OutputError: A file cannot be written.
    """
    with deferred() as written, contextlib.ExitStack() as stack:
        writers = [_UnitWriter(unit, work, stack) for unit in units]
        for by_split in divide_rows(pieces, units[0].block, [unit.split for unit in units]):
            for writer, rows in zip(writers, by_split, strict=True):
                writer.write(rows, *encode(rows))
    return [writer.result() for writer in writers], written


class _UnitWriter:
    """Writes the files of a unit piece by piece; closing the stack completes them."""

    def __init__(self, unit: Unit, work: Path, stack: contextlib.ExitStack) -> None:
        self._unit = unit
        self._rejected_file = rejected_file(work, unit)
        self._stack = stack
        self._part = stack.enter_context(PartWriter(work / PARTS / unit.file))
        self._rejected: Any = None  # the open file, after the first bad row
        self._lines = 0
        self._bad: list[list[Any]] = []
        self._tallies: list[dict[str, Any]] = []

    def write(self, rows: RawRows, table: pa.Table, oov: np.ndarray) -> None:
        if rows.bad and self._rejected is None:
            temporary = self._stack.enter_context(atomic_path(self._rejected_file))
            self._rejected = self._stack.enter_context(open(temporary, "wb"))  # noqa: SIM115
        for row in rows.bad:
            text = row.text.replace(b"\r", b"").replace(b"\n", b"\\n")
            line = self._lines + row.line
            self._rejected.write(b"%d\t%s\t%s\n" % (line, row.reason.encode(), text))
            if len(self._bad) < MAX_DESCRIBED:
                self._bad.append([line, row.reason])
        self._lines += rows.lines
        # An undivided block has a part even if all of its rows are malformed.
        is_divided = isinstance(self._unit.block, DividedBlock) or rows.waiting or rows.done
        if len(table) or not is_divided:
            self._part.write(table)
        self._tallies.append(
            {
                "rows": len(rows),
                "bad_count": rows.bad_count,
                "waiting": rows.waiting,
                "done": rows.done,
                "positives": int(np.count_nonzero(rows.labels[:1])),
                "dense_missing": count_missing(rows.dense_missing, len(rows.dense)),
                "null": count_missing(rows.categorical_missing, len(rows.categorical)),
                "oov": oov,
                "drawn": count_drawn(rows),
            }
        )
        if rows.vector_rows is not None:
            without = np.count_nonzero(rows.vector_rows == NO_VECTOR, axis=1)
            self._tallies[-1]["no_vector"] = without

    def result(self) -> UnitResult:
        sums = {}
        for name in self._tallies[0]:
            sums[name] = np.sum([tally[name] for tally in self._tallies], axis=0).tolist()
        return UnitResult(unit=self._unit, bad=self._bad, size=self._part.size, **sums)


def finish_units(work: Path, results: list[UnitResult], written: list[Written]) -> list[UnitResult]:
    """Make the files of :func:`write_units` durable, and record the results; return these."""
    publish(written)
    record(work, results)
    return results


def record(work: Path, results: list[UnitResult]) -> None:
    """Record units whose files are durable. Raises :class:`OutputError`."""
    Journal(work).add({result.unit.file: result.to_dict() for result in results})


def open_recorder(work: Path, ahead: int) -> Syncer[list[UnitResult]]:
    """Return a :class:`Syncer` that records the units of blocks once their files are durable."""

    def record_blocks(blocks: list[list[UnitResult]]) -> None:
        record(work, list(itertools.chain.from_iterable(blocks)))

    return Syncer(record_blocks, ahead)


def read_results(work: Path, units: Iterable[Unit]) -> list[UnitResult]:
    """Read the results of the finished ones among ``units``, in the given order."""
    records = Journal(work).read_finished(UnitRecord)
    return [records[unit.file].result(unit) for unit in units if unit.file in records]


def rejected_file(work: Path, unit: Unit) -> Path:
    """Return the file of a unit's rejected rows.

    Its columns are the line in the unit (from 0), the reason and the raw line.
    """
    return work / REJECTED / f"{unit.split}.{unit.part}.tsv"
