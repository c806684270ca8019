"""The state of a run, below ``OUT/.work``: its plan, and the finished units with their files.

The files of a unit are its part and its rejected rows; its record is in the run's journal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.errors import BadInputError, ClickLogError
from nvt_torchrec.base.files.atomic import (
    Written,
    atomic_path,
    deferred,
    publish,
    read_json,
    write_json,
)
from nvt_torchrec.base.files.journal import Journal, refuse_changes
from nvt_torchrec.base.versions import installed_version
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.lines import read_bytes
from nvt_torchrec.etl.output import CUTS_FILE, PARTS, REJECTED, RESTART
from nvt_torchrec.etl.parquet import write_tables
from nvt_torchrec.etl.plan import DividedBlock, Unit
from nvt_torchrec.etl.results import UnitRecord, UnitResult, count_missing
from nvt_torchrec.etl.row_split import check_lines, divided
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.rows import BadRow, RawRows
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec

log = logging.getLogger(__name__)

#: Bad rows that the record of a unit describes; its file of rejected rows has all of them.
DESCRIBED = 5
#: Packages of other versions may write other bytes.
_VERSIONS_OF = ("nvt-torchrec", "pyarrow", "numpy", "numba", "nvtabular", "pandas")
_MIB, _SAMPLES = 1 << 20, 16


#: Rows read (with labels), what is written for them, and int64 [categorical columns]:
#: out-of-vocabulary ids.
Piece: TypeAlias = tuple[RawRows, pa.Table, np.ndarray]


def write_unit(unit: Unit, pieces: Iterable[Piece], work: Path) -> tuple[UnitResult, list[Written]]:
    """Write a unit's part and its rejected rows, to be published before the unit is recorded.

    Args:
        unit: the unit.
        pieces: all rows of the unit in their order, in one or more pieces, each of which is made
            when it is written; if that raises, no file is left.
        work: directory of the run's state, with the parts.

    Returns:
        What :func:`record` takes, and the files, which :func:`base.files.atomic.publish` takes.

    Raises:
        OutputError: a file cannot be written.
    """
    tallies: list[dict[str, Any]] = []
    bad: list[list[Any]] = []

    with deferred() as written, contextlib.ExitStack() as stack:
        rejected: list[IO[bytes]] = []  # the file, once there is a bad row

        def tables() -> Iterator[pa.Table]:
            lines = 0
            for rows, table, oov in pieces:
                tallies.append(_tally(unit, rows, oov))
                if rows.bad and not rejected:
                    temporary = stack.enter_context(atomic_path(rejected_file(work, unit)))
                    rejected.append(stack.enter_context(open(temporary, "wb")))
                for row in rows.bad:
                    _write_rejected(rejected[0], lines + row.line, row)
                first = rows.bad[: DESCRIBED - len(bad)]
                bad.extend([lines + row.line, row.reason] for row in first)
                lines += rows.lines
                if len(table) or not isinstance(unit.block, DividedBlock):
                    yield table

        size = _write_part(tables(), work / PARTS / unit.file)
    sums = {
        name: np.sum([tally[name] for tally in tallies], axis=0).tolist() for name in tallies[0]
    }
    return UnitResult(unit=unit, bad=bad, size=size, **sums), written


def write_units(
    units: Sequence[Unit],
    pieces: Iterable[RawRows],
    encode: Callable[[RawRows], Piece],
    work: Path,
) -> tuple[list[UnitResult], list[Written]]:
    """Write the units of one block, which is read once; see :func:`write_unit`.

    Args:
        units: Some or all units of the block.
        pieces: All rows of the block in their order.
        encode: Encodes rows of one split.
        work: As in :func:`write_unit`.
    """
    waiting: list[deque[Piece]] = [deque() for _ in units[1:]]

    def of_first() -> Iterator[Piece]:
        """Yield the pieces of the first unit as they are read; keep those of the others."""
        for first, *others in divided(pieces, units[0].block, [unit.split for unit in units]):
            for kept, rows in zip(waiting, others, strict=True):
                kept.append(encode(rows))
            yield encode(first)

    results, files = [], []
    for unit, encoded in zip(units, [of_first(), *map(_consumed, waiting)], strict=True):
        result, written = write_unit(unit, encoded, work)
        results.append(result)
        files += written
    return results, files


def _consumed(pieces: deque[Piece]) -> Iterator[Piece]:
    """Yield the pieces, and keep none of those that were yielded."""
    while pieces:
        yield pieces.popleft()


def _write_part(tables: Iterator[pa.Table], path: Path) -> int:
    """Write a part unless there are no tables; bytes written."""
    for first in tables:
        return write_tables(itertools.chain([first], tables), path)
    return 0


def _tally(unit: Unit, rows: RawRows, oov: np.ndarray) -> dict[str, Any]:
    if not isinstance(unit.block, DividedBlock):  # else checked before it was divided
        check_lines(rows, unit.block)
    return {
        "rows": len(rows),
        "bad_count": rows.bad_count,
        "positives": np.count_nonzero(rows.label),
        "dense_missing": count_missing(rows.dense_missing, len(rows.dense)),
        "null": count_missing(rows.categorical_missing, len(rows.categorical)),
        "oov": oov,
    }


def finish_units(work: Path, results: list[UnitResult], written: list[Written]) -> list[UnitResult]:
    """Make what :func:`write_units` wrote durable, and record it; return the results."""
    publish(written)
    record(work, results)
    return results


def record(work: Path, results: list[UnitResult]) -> None:
    """Record units whose files are in place. Raises :class:`OutputError`."""
    Journal(work).add({result.unit.file: result.to_dict() for result in results})


def recorded(work: Path, units: Iterable[Unit]) -> list[UnitResult]:
    """The results of those units that are done, in the order given."""
    records = Journal(work).finished(UnitRecord)
    return [records[unit.file].result(unit) for unit in units if unit.file in records]


def rejected_file(work: Path, unit: Unit) -> Path:
    """Where a unit's rejected rows are: line in the unit, from 0; reason; the raw line."""
    return work / REJECTED / f"{unit.split}.{unit.part}.tsv"


def _write_rejected(file: IO[bytes], line: int, bad: BadRow) -> None:
    text = bad.text.replace(b"\r", b"").replace(b"\n", b"\\n")
    file.write(b"%d\t%s\t%s\n" % (line, bad.reason.encode(), text))


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
    before = with_defaults(dataclasses.asdict(begun))
    if now["settings"].get("on_bad_rows") == "quarantine":
        # no finished unit had bad rows: quarantine would have done the same
        before["settings"]["on_bad_rows"] = "quarantine"
    return before


def already_finished(output: Path, now: dict[str, Any], remedy: str) -> Manifest:
    """Return the manifest of a finished job that is asked for again; its plan must be the same.

    Args:
        output: What the job wrote.
        now: The plan, see :func:`plan_record`. Versions are not compared: others may read the
            output.
        remedy: What to do about another plan.

    Raises:
        BadInputError: The output is damaged, or an extension of it was interrupted.
        OutputError: The plan is another one.
    """
    paths = EtlOutput(output)
    paths.check_whole()
    manifest = Manifest.read(paths.manifest)
    inputs = manifest.without_extensions(manifest.fingerprints())
    before = with_defaults({"settings": manifest.settings, "inputs": inputs})
    now = {"settings": now["settings"], "inputs": manifest.without_extensions(now["inputs"])}
    refuse_changes(before, now, output, remedy)
    log.info("%s: finished already, nothing to do", output)
    return manifest


def check_cuts(work: Path, units: Iterable[Unit], input_path: str) -> None:
    """Refuse to resume a job if its input would be cut into other units than before."""
    cuts = [[u.file, u.block.source, u.block.begin, u.block.end, *_rule(u)] for u in units]
    path = work / CUTS_FILE
    if path.exists() and read_json(path, "the cuts of an unfinished run") != cuts:
        raise BadInputError(
            f"{input_path}: the positions of lines changed since the run began, although sizes and "
            "times of the files are the same",
            "begin again with --restart",
        )
    write_json(path, cuts)


def _rule(unit: Unit) -> list[Any]:
    """What decides which rows of a divided block are in which split, JSON-ready."""
    block = unit.block
    return [block.first_row, *block.rule.cuts] if isinstance(block, DividedBlock) else []


def with_defaults(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan of an earlier run, with the keys of its spec that its version did not have yet."""
    with contextlib.suppress(ClickLogError, KeyError):  # no spec, or a damaged one: a change
        spec = FeatureSpec.from_dict(plan["settings"]["spec"]).to_dict()
        settings = {**plan["settings"], "spec": json.loads(json.dumps(spec))}
        return {**plan, "settings": settings}
    return plan


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
