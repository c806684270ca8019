"""The state of a run, below ``OUT/.work``: its plan, and the finished units with their files.

The files of a unit are its part and its rejected rows; its record is in the run's journal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, Generic, Self, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.files.atomic import (
    Written,
    atomic_path,
    deferred,
    publish,
)
from nvt_torchrec.base.files.journal import Journal, refuse_changes
from nvt_torchrec.base.versions import installed_version
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.lines import read_bytes
from nvt_torchrec.etl.output import PARTS, REJECTED, RESTART
from nvt_torchrec.etl.parquet import PartWriter
from nvt_torchrec.etl.plan import DividedBlock, Unit
from nvt_torchrec.etl.results import UnitRecord, UnitResult, count_missing
from nvt_torchrec.etl.row_split import divided
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.rows import RawRows

log = logging.getLogger(__name__)

#: Bad rows that the record of a unit describes; its file of rejected rows has all of them.
DESCRIBED = 5
#: Packages of other versions may write other bytes.
_VERSIONS_OF = ("nvt-torchrec", "pyarrow", "numpy", "numba", "nvtabular", "pandas")
_MIB, _SAMPLES = 1 << 20, 16
_Item = TypeVar("_Item")


#: What is written for rows, and int64 [categorical columns]: out-of-vocabulary ids.
Encoded: TypeAlias = tuple[pa.Table, np.ndarray]


def write_units(
    units: Sequence[Unit],
    pieces: Iterable[RawRows],
    encode: Callable[[RawRows], Encoded],
    work: Path,
) -> tuple[list[UnitResult], list[Written]]:
    """Write the parts and rejected rows of the units of one block, which is read once.

    Args:
        units: Some or all units of the block.
        pieces: All rows of the block in their order, in one or more pieces, each of which is made
            when it is written; if that raises, no file is left.
        encode: Encodes rows of one split.
        work: The directory of the run's state, with the parts.

    Returns:
        What :func:`record` takes, and the files, which :func:`base.files.atomic.publish` takes.

    Raises:
        OutputError: A file cannot be written.
    """
    with deferred() as written, contextlib.ExitStack() as stack:
        writers = [_UnitWriter(unit, work, stack) for unit in units]
        for by_split in divided(pieces, units[0].block, [unit.split for unit in units]):
            for writer, rows in zip(writers, by_split, strict=True):
                writer.write(rows, *encode(rows))
    return [writer.result() for writer in writers], written


class _UnitWriter:
    """Writes the files of a unit piece by piece; the stack, when it ends, completes them."""

    def __init__(self, unit: Unit, work: Path, stack: contextlib.ExitStack) -> None:
        self._unit, self._rejected_file, self._stack = unit, rejected_file(work, unit), stack
        self._part = stack.enter_context(PartWriter(work / PARTS / unit.file))
        self._rejected: IO[bytes] | None = None  # the file, once there is a bad row
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
            if len(self._bad) < DESCRIBED:
                self._bad.append([line, row.reason])
        self._lines += rows.lines
        if len(table) or not isinstance(self._unit.block, DividedBlock):
            self._part.write(table)
        self._tallies.append(
            {
                "rows": len(rows),
                "bad_count": rows.bad_count,
                "positives": np.count_nonzero(rows.label),
                "dense_missing": count_missing(rows.dense_missing, len(rows.dense)),
                "null": count_missing(rows.categorical_missing, len(rows.categorical)),
                "oov": oov,
            }
        )

    def result(self) -> UnitResult:
        sums = {
            name: np.sum([tally[name] for tally in self._tallies], axis=0).tolist()
            for name in self._tallies[0]
        }
        return UnitResult(unit=self._unit, bad=self._bad, size=self._part.size, **sums)


def finish_units(work: Path, results: list[UnitResult], written: list[Written]) -> list[UnitResult]:
    """Make what :func:`write_units` wrote durable, and record it; return the results."""
    publish(written)
    record(work, results)
    return results


def record(work: Path, results: list[UnitResult]) -> None:
    """Record units whose files are in place. Raises :class:`OutputError`."""
    Journal(work).add({result.unit.file: result.to_dict() for result in results})


def recording(work: Path, ahead: int) -> Syncer[list[UnitResult]]:
    """Return what records the units of blocks once their files are durable; see :class:`Syncer`."""
    return Syncer(lambda done: record(work, [unit for block in done for unit in block]), ahead)


class Syncer(Generic[_Item]):
    """A context manager that makes written units of work durable in a thread of its own.

    Units that are added during a sync are synced together afterwards. When the context ends, all
    units are durable, or the error is raised.

    Args:
        note: A function that records units as finished. It is called in the syncing thread, with
            units whose files are durable and in place, in the order in which they were added.
        ahead: The number of units that may wait for the next sync; :meth:`add` blocks when there
            are more.
    """

    def __init__(self, note: Callable[[list[_Item]], object], ahead: int) -> None:
        self._note = note
        self._room = threading.Semaphore(ahead)
        self._waiting: SimpleQueue[tuple[Sequence[Written], _Item]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "sync")
        self._error: BaseException | None = None

    def add(self, written: Sequence[Written], unit: _Item) -> None:
        """Sync a unit's files (see :func:`base.files.atomic.deferred`), then record the unit.

        Raises:
            OutputError: The files of this unit, or of an earlier one, cannot be written.
        """
        self._room.acquire()
        self._waiting.put((written, unit))
        self._thread.submit(self._sync)
        self._raise()

    def wait(self) -> None:
        """Wait until all added units are durable; raises what :meth:`add` raises."""
        self._thread.submit(self._sync).result()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _sync(self) -> None:
        """Sync and record all units that wait; later calls for the same units find none."""
        files: list[Written] = []
        units: list[_Item] = []
        for _ in range(self._waiting.qsize()):  # without those that are added meanwhile
            written, unit = self._waiting.get()
            self._room.release()
            files += written
            units.append(unit)
        try:
            if units:
                publish(files)
                self._note(units)
        except BaseException as error:
            self._error = self._error or error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        self._thread.shutdown()
        if error is None:
            self._raise()


def recorded(work: Path, units: Iterable[Unit]) -> list[UnitResult]:
    """The results of those units that are done, in the order given."""
    records = Journal(work).finished(UnitRecord)
    return [records[unit.file].result(unit) for unit in units if unit.file in records]


def rejected_file(work: Path, unit: Unit) -> Path:
    """Where a unit's rejected rows are: line in the unit, from 0; reason; the raw line."""
    return work / REJECTED / f"{unit.split}.{unit.part}.tsv"


def plan_record(settings: dict[str, Any], days: list[DayFile]) -> dict[str, Any]:
    """What a run depends on, in JSON: settings, inputs, versions of what writes the output."""
    versions = {name: installed_version(name) for name in _VERSIONS_OF}
    inputs = {day.path: fingerprint(day) for day in days}
    value = {"settings": settings, "inputs": inputs, "versions": versions}
    return json.loads(json.dumps(value))  # tuples are lists in there


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """The plan of a job in JSON, see :func:`plan_record`."""

    settings: dict[str, Any]
    inputs: dict[str, dict[str, Any]]
    versions: dict[str, Any]


def begin_or_resume(work: Path, now: dict[str, Any], output: Path) -> bool:
    """Whether a job is resumed; its plan must be that of its beginning.

    Args:
        work: directory of the job's state.
        now: its plan, see :func:`plan_record`.
        output: what it writes, for errors.

    Raises:
        BadInputError: the plan of the beginning is damaged.
        OutputError: the plan is another one, or cannot be written.
    """
    journal = Journal(work)
    begun = journal.plan(PlanRecord, RESTART)
    if begun is None:
        journal.begin(now)
    else:
        before = before_resuming(begun, now)
        refuse_changes(before, now, output, f"undo that, or {RESTART}")
        log.info("%s: resuming a run that did not finish", output)
        journal.update(now)
    return begun is not None


def before_resuming(begun: PlanRecord, now: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of the beginning, as that of a resumed job has to be."""
    before = dataclasses.asdict(begun)
    if now["settings"].get("on_bad_rows") == "quarantine":
        # no finished unit had bad rows: quarantine would have done the same
        before["settings"]["on_bad_rows"] = "quarantine"
    return before


def already_finished(output: Path, now: dict[str, Any]) -> Manifest:
    """Return the manifest of a finished run that is asked for again; its plan must be the same.

    Args:
        output: What the run wrote.
        now: The plan, see :func:`plan_record`. Versions are not compared: others may read the
            output.

    Raises:
        BadInputError: The output is damaged, or an extension of it was interrupted.
        OutputError: The plan is another one.
    """
    paths = EtlOutput(output)
    paths.check_whole()
    manifest = Manifest.read(paths.manifest)
    inputs = manifest.without_extensions(manifest.fingerprints())
    before = {"settings": manifest.settings, "inputs": inputs}
    now = {"settings": now["settings"], "inputs": manifest.without_extensions(now["inputs"])}
    remedy = "choose another --output_path, or add new days with `python -m etl extend`"
    refuse_changes(before, now, output, remedy)
    log.info("%s: finished already, nothing to do", output)
    return manifest


def fingerprint(day: DayFile) -> dict[str, Any]:
    """What identifies the content of a file: its size and time of change.

    Where a file system knows no time, it is a checksum of the first and last bytes.

    Raises:
        BadInputError: it cannot be read.
    """
    if day.modified is not None:
        return {"size": day.size, "modified": str(day.modified)}
    ends = {(0, min(day.size, _MIB)), (max(0, day.size - _MIB), day.size)}
    return {"size": day.size, "sha256 of its ends": _digest(day, sorted(ends))}


def content_digest(day: DayFile) -> str:
    """Return a digest by which copies of a file are known: of its size, and of 16 MiB in 16 places.

    All of a small file is read. To read all of a large one would take as long as a tenth of a run.

    Raises:
        BadInputError: It cannot be read.
    """
    step = max(_MIB, -(-day.size // _SAMPLES))
    places = [(begin, min(begin + _MIB, day.size)) for begin in range(0, day.size, step)]
    return f"{day.size}-{_digest(day, places)}"


def _digest(day: DayFile, ranges: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for begin, end in ranges:
        digest.update(read_bytes(day.path, begin, end))
    return digest.hexdigest()
