"""What is done with a block of a log in Criteo's format on a card: count it, or encode it.

A block goes through the card on a lane, a thread with a stream and a pinned buffer of its own. With
:data:`LANES` of them, one block is read while others are copied, parsed, encoded and written.

Moments are computed on the host, from the dense columns that the card has parsed: their last bits
depend on the order of additions, so the cpu engine's function adds up the same pieces. That takes
a thread about 0.2 s per GB of text, and the copy 60 of a row's 200 bytes in the direction in which
nothing else of size is copied while fitting. Counts are those of the host
(:mod:`etl.units.counting`): sorting and adding integers has one result.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from nvt_torchrec.base.device import Device
from nvt_torchrec.base.files.atomic import Written
from nvt_torchrec.clicklog.readers.lines import read_into
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.clicklog.text.device import RawDeviceRows, pad_text, parse_on_device
from nvt_torchrec.clicklog.text.fast_rows import count_newlines
from nvt_torchrec.etl.engines import host
from nvt_torchrec.etl.engines.runs import SortedRun
from nvt_torchrec.etl.units import counting
from nvt_torchrec.etl.units.counting import Counts, compute_moments, has_moments, merge_moments
from nvt_torchrec.etl.units.unit_plan import Unit
from nvt_torchrec.etl.units.writing import Encoded, LostRowsError, UnitResult, write_units
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.formats.rows import CategoryValues, RawRows
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.workflows.compiled import CompiledWorkflow, EncodedRows, to_table
from nvt_torchrec.workflows.compiled.device import DeviceEncoded, DeviceWorkflow, count_missing

log = logging.getLogger(__name__)

#: Blocks on their way through a card at once: one is read, one copied, one computed, one written.
LANES = 4


def _pinned_bytes(block_bytes: int) -> int:
    return block_bytes + block_bytes // 8 + 1  # blocks vary by a line


class Lane:
    """A stream of a card and a pinned buffer, for one thread at a time."""

    def __init__(self, device: Device) -> None:
        self.stream = device.stream()
        self._device = device
        self._buffer = np.empty(0, np.uint8)

    def read(self, block: Block) -> np.ndarray:
        """Read a block as whole lines: uint8, valid until the next call."""
        size = block.end - block.begin
        if len(self._buffer) <= size:
            self._buffer = self._device.allocate_pinned(_pinned_bytes(size))
        read_into(block.path, block.begin, block.end, memoryview(self._buffer))  # type: ignore[arg-type]
        return pad_text(self._buffer, size)


class Card:
    """A card and its lanes."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._free: SimpleQueue[Lane] = SimpleQueue()
        for _ in range(LANES):
            self._free.put(Lane(device))

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """Wait for a free lane; its stream is the current one within the context."""
        lane = self._free.get()
        try:
            with lane.stream:
                yield lane
        finally:
            self._free.put(lane)

    def parse(self, lane: Lane, block: Block, spec: FeatureSpec) -> RawDeviceRows | None:
        """Read a block and parse it on the card; None if the host must parse it.

        Raises:
            BadInputError: The block cannot be read.
            LostRowsError: The card found another number of lines than the host.
        """
        text = lane.read(block)
        # a longer line would change the pieces of which moments are computed
        limit = min(spec.input.line_limit, counting.PIECE_BYTES - 1)
        rows = parse_on_device(self.device, self.device.upload(text), spec, limit)
        if rows is None:
            log.debug("parsing %s:%d again on the host", block.source, block.begin)
            return None
        lines = count_newlines(_view_read_only(text))
        if len(rows) != lines:
            raise LostRowsError(
                f"{block.source}, bytes {block.begin} to {block.end}: {lines} lines, but the GPU "
                f"found {len(rows)}",
                "this is a defect; use --engine cpu",
            )
        return rows


def _view_read_only(text: np.ndarray) -> np.ndarray:
    text = text.view()
    text.flags.writeable = False  # the type of array for which the loop is compiled already
    return text


def count_values(
    device: Device, rows: RawDeviceRows, vocabularies: np.ndarray, absent: np.ndarray
) -> list[Counts]:
    """Count the values of all vocabularies, by one sort of ``number of the vocabulary, value``.

    A sort for each would be too small for a card, and wait for it several times.

    Args:
        device: The card.
        rows: The rows.
        vocabularies: The number of each column's vocabulary; -1 where nothing is counted.
        absent: By vocabulary, how many zeros stand for missing values and are not counted.

    Returns:
        The counts by vocabulary.
    """
    arrays = device.arrays
    counted = np.flatnonzero(vocabularies >= 0)
    # The upper 32 bits are the vocabulary, the lower ones the value.
    high = device.upload(vocabularies[counted].astype(np.uint64) << np.uint64(32))
    keys = rows.categorical[device.upload(counted)].astype(np.uint64) | high[:, np.newaxis]
    values, counts = arrays.unique(keys.reshape(-1), return_counts=True)
    counts = counts.astype(np.int64)
    starts = np.arange(len(absent) + 1, dtype=np.uint64) << np.uint64(32)
    cuts = device.download(arrays.searchsorted(values, device.upload(starts)))
    begins = cuts[:-1].copy()
    # Zeros for missing values are the first value of their vocabulary. Where no others are left,
    # the value is dropped.
    with_missing = np.intersect1d(np.flatnonzero(absent), vocabularies[counted])
    if len(with_missing):
        zeros = device.upload(begins[with_missing])
        counts[zeros] -= device.upload(absent[with_missing])
        begins[with_missing] += device.download(counts[zeros]) == 0
    counts_of_vocabularies = []
    for begin, end in zip(begins, cuts[1:], strict=True):
        values_of_vocabulary = values[begin:end].astype(np.uint32)
        counts_of_vocabularies.append(Counts(values_of_vocabulary, counts[begin:end]))
    return counts_of_vocabularies


def merge_on_device(device: Device, several: Sequence[Counts]) -> Counts:
    """Add up counts, at least one."""
    arrays = device.arrays
    filled = [counts for counts in several if len(counts.values)]
    if not filled:
        return several[0]
    if len(filled) == 1:
        return filled[0]
    values = arrays.concatenate([counts.values for counts in filled])
    order = arrays.argsort(values)
    values = values[order]
    sums = arrays.cumsum(arrays.concatenate([counts.counts for counts in filled])[order])
    # The count of a value is the sum up to its last occurrence less that of the value before.
    is_last = arrays.concatenate([values[1:] != values[:-1], arrays.ones(1, np.bool_)])
    last = arrays.flatnonzero(is_last)
    counts = sums[last].copy()
    counts[1:] -= sums[last[:-1]]
    return Counts(values[last], counts)


def count_block(card: Card, block: Block, spec: FeatureSpec, *, max_bad_rows: int) -> SortedRun:
    """Count the categories of a block, and compute the moments of its dense columns.

    Returns:
        The counts, with arrays of the card.

    Raises:
        BadRowError: A row is malformed, unless they are rejected.
        BadInputError: The block cannot be read.
    """
    device = card.device
    with card.lane() as lane:
        rows = card.parse(lane, block, spec)
        if rows is None:
            run = host.count_block(block, spec, max_bad_rows)
            uploaded = []
            for counts in run.counts:
                uploaded.append(Counts(device.upload(counts.values), device.upload(counts.counts)))
            counted = SortedRun(run.rows, run.nulls, run.moments, uploaded)
        else:
            counted = count_rows(device, rows, block, spec)
        device.synchronize()  # other streams read the counts
    return counted


def count_rows(device: Device, rows: RawDeviceRows, block: Block, spec: FeatureSpec) -> SortedRun:
    """Count parsed rows of a block, on the current stream."""
    numbers = {name: number for number, name in enumerate(spec.vocabularies)}
    vocabularies = np.array([numbers[column.vocabulary_name] for column in spec.categorical], int)
    missing = count_missing(device, rows.missing[1], len(vocabularies))
    nulls = np.zeros(len(numbers), np.int64)
    np.add.at(nulls, vocabularies, missing)
    # Where the id is a hash there is nothing to count.
    is_hashed = [bool(column.hash_buckets) for column in spec.categorical]
    counts = count_values(device, rows, np.where(is_hashed, -1, vocabularies), nulls)
    return SortedRun(
        rows=len(rows),
        nulls=nulls,
        moments=_compute_moments(device, rows, block, spec)[np.newaxis],
        counts=counts,
    )


def _compute_moments(
    device: Device, rows: RawDeviceRows, block: Block, spec: FeatureSpec
) -> np.ndarray:
    """Compute the moments as :func:`etl.engines.host.count_block` does: float64 [dense, 4]."""
    moments = [np.zeros((len(spec.dense), 4))]
    if has_moments(spec):
        dense, missing = device.download(rows.dense), device.download(rows.missing)
        # A piece ends with the last whole line before a multiple of its size.
        read = np.arange(counting.PIECE_BYTES, block.end - block.begin, counting.PIECE_BYTES)
        cuts = device.download(device.arrays.searchsorted(rows.ends, device.upload(read)))
        for begin, end in itertools.pairwise([0, *cuts.tolist(), len(rows)]):
            labels = np.empty((0, end - begin), np.uint8)
            piece = _raw_rows(labels, dense[:, begin:end], missing[:, begin:end])
            moments.append(compute_moments(piece, spec))
    return merge_moments(moments)


def _raw_rows(
    labels: np.ndarray,
    dense: np.ndarray,
    missing: np.ndarray,
    categorical: np.ndarray | Sequence[CategoryValues] = (),
) -> RawRows:
    """Return well-formed rows, copied from the card; ``missing`` as in :class:`RawDeviceRows`."""
    return RawRows(
        labels=labels,
        dense=dense,
        dense_missing=missing[:1],
        categorical=categorical,
        categorical_missing=missing[1:],
        line=np.arange(missing.shape[1]),
        lines=missing.shape[1],
    )


def merge_runs(card: Card, runs: list[SortedRun]) -> SortedRun:
    """Merge the counts of consecutive blocks on the card, and copy them to the host."""
    device = card.device
    with card.lane():
        counts = []
        for counts_of_vocabulary in zip(*(run.counts for run in runs), strict=True):
            merged = merge_on_device(device, counts_of_vocabulary)
            counts.append(Counts(device.download(merged.values), device.download(merged.counts)))
    return SortedRun(
        rows=sum(run.rows for run in runs),
        nulls=np.sum([run.nulls for run in runs], axis=0),
        moments=np.concatenate([run.moments for run in runs]),
        counts=counts,
    )


def encode_unit(
    card: Card,
    unit: Unit,
    workflow: DeviceWorkflow,
    on_host: CompiledWorkflow,
    work: Path,
    *,
    max_bad_rows: int,
) -> tuple[list[UnitResult], list[Written]]:
    """Encode a unit on the card, and write its part as the host does.

    Returns what :func:`etl.units.writing.write_units` does.

    Args:
        card: The card.
        unit: A whole block.
        workflow: The saved workflow, on the card.
        on_host: The same, for a block that the host must parse.
        work: The directory of the run's state.
        max_bad_rows: How many malformed rows may be left out; 0: one is an error.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: The block cannot be read.
        OutputError: The part cannot be written.
    """
    with card.lane() as lane:
        rows = card.parse(lane, unit.block, workflow.spec)
        if rows is not None:
            codes = workflow.transform(rows.dense, rows.categorical, rows.missing)
            raw_rows, encoded = copy_encoded(card.device, rows, codes, workflow.schema)
    if rows is None:
        return host.encode_block((unit,), on_host, work, max_bad_rows=max_bad_rows)
    return write_units([unit], [raw_rows], lambda _: encoded, work)


def copy_encoded(
    device: Device, rows: RawDeviceRows, encoded: DeviceEncoded, schema: TableSchema
) -> tuple[RawRows, Encoded]:
    """Copy parsed rows to the host, and what ``write_units`` writes for them."""
    arrays = (rows.label, rows.missing, encoded.dense, encoded.ids)
    label, missing, dense, ids = map(device.download, arrays)
    labels = label[np.newaxis]
    on_host = EncodedRows(labels.astype(np.float32), dense, Ids(ids), encoded.null, encoded.oov)
    return _raw_rows(labels, dense, missing, ids), (to_table(on_host, schema), encoded.oov)
