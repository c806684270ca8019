"""Count or encode a block of a log in Criteo's format on a GPU.

A block passes through the GPU on a lane: a stream and a pinned buffer. With :data:`LANES` lanes,
one block is read while others are copied, parsed and encoded. A thread holds a lane only while it
needs the buffer or the GPU. Work of the host alone (moments, blocks with malformed lines, Arrow
tables, writing) is done without a lane, so that the next block can have it. All that is kept of a
block, except its counts, is in host memory by then, so the number of lanes bounds the memory of the
GPU.

Each wait for the GPU costs a round trip in which the lane is idle. So arrays are copied to the host
together, and counts stay on the GPU until those of a group of blocks have been merged.

This code has run on a GPU (docs/gpu.md), but not since host work was moved out of the lanes and
the counts of all vocabularies are merged in one pass.

Moments are computed on the host, from the dense columns that the GPU has parsed: the last bits of
a sum depend on the order of additions, and the cpu engine's function adds up the same pieces. This
takes a thread about 0.2 s per GB of text. It copies 60 of a row's 200 bytes to the host, a
direction that nothing else of size uses while fitting. Counts need no such care
(:mod:`etl.units.counting`): sums of integers do not depend on the order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from nvt_torchrec.base.device import Device, DeviceArray
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
from nvt_torchrec.etl.units.writing import LostRowsError, UnitResult, write_units
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.formats.rows import CategoryValues, RawRows
from nvt_torchrec.workflows.compiled import CompiledWorkflow, EncodedRows, to_table
from nvt_torchrec.workflows.compiled.device import DeviceEncoded, DeviceWorkflow, count_missing

log = logging.getLogger(__name__)

#: The number of blocks that pass through a GPU at once: one is read, one copied to the GPU, one
#: computed, one copied back.
LANES = 4
#: The number of bits of a value. A key has the index of the vocabulary above them.
_VALUE_BITS = np.uint64(32)


def _pinned_bytes(block_bytes: int) -> int:
    return block_bytes + block_bytes // 8 + 1  # block sizes differ by up to a line


class Lane:
    """A stream of a GPU and a pinned buffer, for one thread at a time."""

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


class Gpu:
    """A GPU and its lanes, shared by all tasks of a process."""

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
        """Read a block and parse it on the GPU; None if the host must parse it.

        Raises:
            BadInputError: The block cannot be read.
            LostRowsError: The GPU and the host count different numbers of lines.
        """
        text = lane.read(block)
        # A longer line would change the pieces from which moments are computed.
        limit = min(spec.input.line_limit, counting.PIECE_BYTES - 1)
        rows = parse_on_device(self.device, self.device.upload(text), spec, limit)
        # The GPU parses meanwhile. The lines must be counted before the lane is released, because
        # its next block overwrites the text.
        lines = count_newlines(_view_read_only(text))
        if self.device.download(rows.malformed)[0]:
            log.debug("parsing %s:%d again on the host", block.source, block.begin)
            return None
        if len(rows) != lines:
            raise LostRowsError(
                f"{block.source}, bytes {block.begin} to {block.end}: {lines} lines, but the GPU "
                f"found {len(rows)}",
                "this is a defect; use --engine cpu",
            )
        return rows


def _view_read_only(text: np.ndarray) -> np.ndarray:
    text = text.view()
    text.flags.writeable = False  # count_newlines is already compiled for read-only arrays
    return text


class DeviceCounts(NamedTuple):
    """The distinct values of all vocabularies and their counts, on a GPU.

    Attributes:
        keys: uint64 [n] in ascending order: the index of the vocabulary in the upper 32 bits, the
            value in the lower 32.
        counts: int64 [n]. The count of the value 0 is 0 if every zero stands for a missing value.
    """

    keys: DeviceArray
    counts: DeviceArray


@dataclasses.dataclass(frozen=True)
class DeviceRun:
    """The counts and moments of a block, as in :class:`SortedRun`, but with counts on a GPU.

    Attributes:
        rows: See :class:`SortedRun`.
        nulls: See :class:`SortedRun`.
        moments: float64 [dense columns, 4].
        counts: The counts of all vocabularies.
    """

    rows: int
    nulls: np.ndarray
    moments: np.ndarray
    counts: DeviceCounts


class _CountedRows(NamedTuple):
    """The GPU's results for a block. All of them except the counts are in host memory.

    Attributes:
        rows: The number of rows.
        nulls: See :class:`SortedRun`.
        counts: The counts of all vocabularies.
        pieces: The dense columns from which moments are computed, see :func:`_copy_pieces`.
    """

    rows: int
    nulls: np.ndarray
    counts: DeviceCounts
    pieces: list[RawRows]


def count_values(
    device: Device, rows: RawDeviceRows, vocabularies: np.ndarray, absent: np.ndarray
) -> DeviceCounts:
    """Count the values of all vocabularies with one sort.

    One sort for each vocabulary would be too small to fill a GPU, and would wait for it each time.

    Args:
        device: The GPU.
        rows: The rows.
        vocabularies: The index of each column's vocabulary; -1 for columns that are not counted.
        absent: For each vocabulary, the number of zeros that stand for missing values, which are
            not counted.
    """
    arrays = device.arrays
    counted = np.flatnonzero(vocabularies >= 0)
    high = device.upload(vocabularies[counted].astype(np.uint64) << _VALUE_BITS)
    keys = rows.categorical[device.upload(counted)].astype(np.uint64) | high[:, np.newaxis]
    keys, counts = arrays.unique(keys.reshape(-1), return_counts=True)
    counts = counts.astype(np.int64)
    with_missing = np.intersect1d(np.flatnonzero(absent), vocabularies[counted])
    if len(with_missing):
        zeros = device.upload(with_missing.astype(np.uint64) << _VALUE_BITS)
        # Counts that become 0 are dropped on the host later: to find them here, the host would have
        # to wait for the GPU.
        counts[arrays.searchsorted(keys, zeros)] -= device.upload(absent[with_missing])
    return DeviceCounts(keys, counts)


def merge_on_device(device: Device, several: Sequence[DeviceCounts]) -> DeviceCounts:
    """Add up one or more counts of all vocabularies with one sort."""
    if len(several) == 1:
        return several[0]
    arrays = device.arrays
    keys = arrays.concatenate([counts.keys for counts in several])
    if not len(keys):
        return several[0]
    order = arrays.argsort(keys)
    keys = keys[order]
    sums = arrays.cumsum(arrays.concatenate([counts.counts for counts in several])[order])
    # The count of a key is the running sum at its last occurrence, minus that of the previous key.
    is_last = arrays.concatenate([keys[1:] != keys[:-1], arrays.ones(1, np.bool_)])
    last = arrays.flatnonzero(is_last)
    counts = sums[last].copy()
    counts[1:] -= sums[last[:-1]]
    return DeviceCounts(keys[last], counts)


def count_block(gpu: Gpu, block: Block, spec: FeatureSpec, *, max_bad_rows: int) -> DeviceRun:
    """Count the categories of a block, and compute the moments of its dense columns.

    Raises:
        BadRowError: A row is malformed, and none may be rejected.
        BadInputError: The block cannot be read.
    """
    counted = _count_on_gpu(gpu, block, spec)
    if counted is None:
        return _upload_run(gpu, host.count_block(block, spec, max_bad_rows))
    moments = [np.zeros((len(spec.dense), 4))]
    for piece in counted.pieces:
        moments.append(compute_moments(piece, spec))
    return DeviceRun(counted.rows, counted.nulls, merge_moments(moments), counted.counts)


def _count_on_gpu(gpu: Gpu, block: Block, spec: FeatureSpec) -> _CountedRows | None:
    """Do the GPU's part of :func:`count_block`; return None if the host must parse the block."""
    with gpu.lane() as lane:
        rows = gpu.parse(lane, block, spec)
        if rows is None:
            return None
        nulls, counts = count_rows(gpu.device, rows, spec)
        pieces = _copy_pieces(gpu.device, rows, block) if has_moments(spec) else []
        gpu.device.synchronize()  # other streams read the counts
        return _CountedRows(len(rows), nulls, counts, pieces)


def _upload_run(gpu: Gpu, run: SortedRun) -> DeviceRun:
    """Copy the host's counts of a block to the GPU, where they are merged with others."""
    keys, counts = [], []
    for number, of_vocabulary in enumerate(run.counts):
        high = np.uint64(number) << _VALUE_BITS
        keys.append(of_vocabulary.values.astype(np.uint64) | high)
        counts.append(of_vocabulary.counts)
    device = gpu.device
    with gpu.lane():
        uploaded = DeviceCounts(*(device.upload(np.concatenate(part)) for part in (keys, counts)))
        device.synchronize()  # other streams read the counts
    (moments,) = run.moments
    return DeviceRun(run.rows, run.nulls, moments, uploaded)


def count_rows(
    device: Device, rows: RawDeviceRows, spec: FeatureSpec
) -> tuple[np.ndarray, DeviceCounts]:
    """Count the categories of parsed rows, on the current stream.

    Returns:
        The number of missing values of each vocabulary's columns, as in :class:`SortedRun`; and
        the counts.
    """
    numbers = {name: number for number, name in enumerate(spec.vocabularies)}
    vocabularies = np.array([numbers[column.vocabulary_name] for column in spec.categorical], int)
    missing = count_missing(device, rows.missing[1], len(vocabularies))
    nulls = np.zeros(len(numbers), np.int64)
    np.add.at(nulls, vocabularies, missing)
    # A column whose ids are hashes has no vocabulary to count.
    is_hashed = [bool(column.hash_buckets) for column in spec.categorical]
    return nulls, count_values(device, rows, np.where(is_hashed, -1, vocabularies), nulls)


def _copy_pieces(device: Device, rows: RawDeviceRows, block: Block) -> list[RawRows]:
    """Copy dense columns to the host, in the pieces of :func:`etl.engines.host.count_block`.

    A piece ends with the last whole line before a multiple of its size.
    """
    read = np.arange(counting.PIECE_BYTES, block.end - block.begin, counting.PIECE_BYTES)
    cuts = device.arrays.searchsorted(rows.ends, device.upload(read))
    dense, missing, cuts = device.download_all([rows.dense, rows.missing, cuts])
    pieces = []
    for begin, end in itertools.pairwise([0, *cuts.tolist(), len(rows)]):
        labels = np.empty((0, end - begin), np.uint8)
        pieces.append(_raw_rows(labels, dense[:, begin:end], missing[:, begin:end]))
    return pieces


def _raw_rows(
    labels: np.ndarray,
    dense: np.ndarray,
    missing: np.ndarray,
    categorical: np.ndarray | Sequence[CategoryValues] = (),
) -> RawRows:
    """Return well-formed rows, copied from the GPU; ``missing`` as in :class:`RawDeviceRows`."""
    return RawRows(
        labels=labels,
        dense=dense,
        dense_missing=missing[:1],
        categorical=categorical,
        categorical_missing=missing[1:],
        line=np.arange(missing.shape[1]),
        lines=missing.shape[1],
    )


def merge_runs(gpu: Gpu, runs: list[DeviceRun]) -> SortedRun:
    """Merge the counts of consecutive blocks on the GPU, and copy them to the host."""
    device = gpu.device
    starts = np.arange(len(runs[0].nulls) + 1, dtype=np.uint64) << _VALUE_BITS
    with gpu.lane():
        merged = merge_on_device(device, [run.counts for run in runs])
        cuts = device.arrays.searchsorted(merged.keys, device.upload(starts))
        values = merged.keys.astype(np.uint32)  # the lower 32 bits
        values, counts, cuts = device.download_all([values, merged.counts, cuts])
    counts_of_vocabularies = []
    for begin, end in itertools.pairwise(cuts.tolist()):
        if begin < end and not counts[begin]:  # every zero stood for a missing value
            begin += 1
        counts_of_vocabularies.append(Counts(values[begin:end], counts[begin:end]))
    return SortedRun(
        rows=sum(run.rows for run in runs),
        nulls=np.sum([run.nulls for run in runs], axis=0),
        moments=np.array([run.moments for run in runs]),
        counts=counts_of_vocabularies,
    )


def encode_unit(
    gpu: Gpu,
    unit: Unit,
    workflow: DeviceWorkflow,
    on_host: CompiledWorkflow,
    work: Path,
    *,
    max_bad_rows: int,
) -> tuple[list[UnitResult], list[Written]]:
    """Encode a unit on the GPU, and write its part as the host does.

    Returns the same as :func:`etl.units.writing.write_units`.

    Args:
        gpu: The GPU.
        unit: A whole block.
        workflow: The saved workflow, on the GPU.
        on_host: The same workflow, for a block that the host must parse.
        work: The directory of the run's state.
        max_bad_rows: The number of malformed rows that may be rejected; 0 makes one an error.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: The block cannot be read.
        OutputError: The part cannot be written.
    """
    copied = _encode_on_gpu(gpu, unit.block, workflow)
    if copied is None:
        return host.encode_block((unit,), on_host, work, max_bad_rows=max_bad_rows)
    raw_rows, encoded = copied
    table = to_table(encoded, workflow.schema)
    return write_units([unit], [raw_rows], lambda _: (table, encoded.oov), work)


def _encode_on_gpu(
    gpu: Gpu, block: Block, workflow: DeviceWorkflow
) -> tuple[RawRows, EncodedRows] | None:
    """Do the GPU's part of :func:`encode_unit`; return None if the host must parse the block."""
    with gpu.lane() as lane:
        rows = gpu.parse(lane, block, workflow.spec)
        if rows is None:
            return None
        codes = workflow.transform(rows.dense, rows.categorical, rows.missing)
        return copy_encoded(gpu.device, rows, codes)


def copy_encoded(
    device: Device, rows: RawDeviceRows, encoded: DeviceEncoded
) -> tuple[RawRows, EncodedRows]:
    """Copy parsed and encoded rows to the host; wait once for all arrays."""
    arrays = (rows.label, rows.missing, encoded.dense, encoded.ids)
    label, missing, dense, ids = device.download_all(arrays)
    labels = label[np.newaxis]
    on_host = EncodedRows(labels.astype(np.float32), dense, Ids(ids), encoded.null, encoded.oov)
    return _raw_rows(labels, dense, missing, ids), on_host
