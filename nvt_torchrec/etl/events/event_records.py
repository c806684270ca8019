"""Rows, events and sums as records, in files that are divided into parts.

A task writes a file of records, ordered by the parts that other tasks read: a block has a part for
each partition, and a partition has a part for each block. So a task gets all that it needs from
another task by a single read, and no file has two writers: the machines of a cluster only need to
share a POSIX file system. The files are scratch files: they are not synced, and a resumed run
writes them again. A worker that lost its coordinator may go on writing for a while, so a file is
renamed to its name only once it is complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from nvt_torchrec.base.arrays import to_offsets
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import TEMPORARY, get_writer_id, output_errors
from nvt_torchrec.base.files.growing import create_array
from nvt_torchrec.etl.events import timeline
from nvt_torchrec.etl.events.extract import flag_type
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.workflows.event_groups import GroupSums

_OFFSET = np.dtype(np.int64)


def row_dtype(spec: FeatureSpec) -> np.dtype:
    """Return the type of a row of the log: its time, the number of its key, and its flags."""
    return np.dtype([("times", np.int64), ("numbers", np.int32), ("flags", flag_type(spec))])


def event_dtype(spec: FeatureSpec, group: GroupSums) -> np.dtype:
    """Return the type of an event; the fields are the attributes of :class:`.EventBlock`."""
    return np.dtype(
        [
            ("known", np.int64),
            ("happened", np.int64),
            ("flags", flag_type(spec)),
            ("numbers", np.int32),
            ("amounts", np.float64, (len(group.amounts),)),
            ("pairs", np.int32, (len(group.distinct_columns),)),
        ]
    )


def sums_dtype(group: GroupSums, *, large: bool) -> np.dtype:
    """Return the type of a row's sums; the fields are the attributes of :class:`.FoundSums`.

    Args:
        group: The sums that are needed.
        large: Whether there may be too many events for 32 bits.
    """
    kind = np.int64 if large else np.int32
    fields: list[tuple] = [("sums", kind, (len(group.sums),))]
    if group.totals:  # the number of values, and their sum
        fields.append(("totals", np.float64, (len(group.totals), 2)))
    if group.picks:
        fields.append(("picks", np.float64, (len(group.picks),)))
    if group.distinct:
        fields.append(("distinct", kind, (len(group.distinct),)))
    if group.has_last:
        fields.append(("last", np.int64))
    return np.dtype(fields)


def history_dtype(columns: int) -> np.dtype:
    """Return the type of a history's event: when it becomes known, its key's number, its ids."""
    return np.dtype([("known", np.int64), ("numbers", np.int32), ("ids", np.int32, (columns,))])


@contextlib.contextmanager
def _open_whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file, renamed to ``path`` once complete. Raises :class:`OutputError`."""
    temporary = path.with_name(f"{path.name}.{get_writer_id()}{TEMPORARY}")
    with output_errors(path):
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)


def iterate_slices(begin: int, end: int) -> Iterator[slice]:
    """Yield slices of at most a chunk each that cover ``begin`` to ``end``."""
    for first in range(begin, end, timeline.CHUNK_ROWS):
        yield slice(first, min(first + timeline.CHUNK_ROWS, end))


def put_records(target: np.ndarray, indices: np.ndarray, records: np.ndarray) -> None:
    """Write records to the given indices of an array.

    They are copied as bytes, because NumPy copies records field by field, ten times slower.
    """
    as_bytes = f"V{target.dtype.itemsize}"
    target.view(as_bytes)[indices] = records.view(as_bytes)


def write_records(
    path: Path,
    dtype: np.dtype,
    offsets: np.ndarray,
    order: np.ndarray,
    columns: dict[str, np.ndarray],
) -> None:
    """Write columns as records.

    Args:
        path: The file.
        dtype: The type of a record.
        offsets: int64 [parts + 1], where the records of each part begin, and the end of the last.
        order: Integers [n], the index of each record in the columns.
        columns: By field, arrays [.., rows].

    Raises:
        OutputError: The file cannot be written.
    """
    with _open_whole(path) as file:
        file.write(np.ascontiguousarray(offsets, _OFFSET).data)
        for piece in iterate_slices(0, len(order)):
            indices = order[piece]
            records = np.empty(len(indices), dtype)
            for name in dtype.names or ():
                records[name] = columns[name][..., indices].T
            file.write(records.view(np.uint8).data)


def save_records(path: Path, offsets: np.ndarray, records: np.ndarray) -> None:
    """Write records that are in the order of their parts. Raises :class:`OutputError`."""
    with _open_whole(path) as file:
        file.write(np.ascontiguousarray(offsets, _OFFSET).data)
        for piece in iterate_slices(0, len(records)):
            file.write(records[piece].view(np.uint8).data)


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array that ``np.load`` reads. Raises :class:`OutputError`."""
    with _open_whole(path) as file:
        np.save(file, np.ascontiguousarray(array))


def read_part(path: Path, dtype: np.dtype, parts: int, number: int) -> np.ndarray:
    """Return the records of part ``number`` of a file with ``parts`` parts."""
    begin, end = _read_bounds(path, number)
    records = np.empty(end - begin, dtype)
    _read_into(path, parts, begin, records)
    return records


def gather_part(
    paths: Sequence[Path], dtype: np.dtype, parts: int, number: int, spilled: Path, maximum: int
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the records of one part of all files.

    Args:
        paths: The files.
        dtype: The type of a record.
        parts: Number of parts of each file.
        number: The number of the part.
        spilled: The file to which the records are written, and from which they are mapped, if they
            are too many for memory.
        maximum: The maximum number of records in memory.

    Returns:
        The records [n]; int64 [files + 1], where the records of each file begin, and the end.
    """
    bounds = [_read_bounds(path, number) for path in paths]
    offsets = to_offsets(np.array([end - begin for begin, end in bounds], np.int64))
    records = allocate(spilled, (int(offsets[-1]),), dtype, maximum)
    for i, (path, (begin, _)) in enumerate(zip(paths, bounds, strict=True)):
        _read_into(path, parts, begin, records[offsets[i] : offsets[i + 1]])
    return records, offsets


def allocate(
    spilled: Path, shape: tuple[int, ...], dtype: np.dtype | type, maximum: int
) -> np.ndarray:
    """Return an array [.., n] in memory, or mapped from a file if n is more than ``maximum``."""
    if shape[-1] <= maximum:
        return np.empty(shape, dtype)
    return create_array(spilled, shape, np.dtype(dtype))


def _read_bounds(path: Path, number: int) -> tuple[int, int]:
    """Return begin and end of the records of a part."""
    with open(path, "rb", buffering=0) as file:
        begin, end = np.fromfile(file, _OFFSET, 2, offset=number * _OFFSET.itemsize).tolist()
    return begin, end


def _read_into(path: Path, parts: int, begin: int, records: np.ndarray) -> None:
    """Read the records from index ``begin`` on into an array."""
    if not len(records):
        return
    with open(path, "rb", buffering=0) as file:
        file.seek((parts + 1) * _OFFSET.itemsize + begin * records.dtype.itemsize)
        wanted = records.view(np.uint8).data
        while wanted:  # a single read returns 2 GiB at most
            num_bytes = file.readinto(wanted)
            if not num_bytes:
                raise BadInputError(f"{path}: cut short", "run again; finished work is kept")
            wanted = wanted[num_bytes:]
