"""What of a run is done already: durable records of its units, below ``OUT/.work``.

A unit's files come first (its rejected rows, its part), then its record; each is written beside,
synced and renamed. So a unit with a record is done for good, and one without is done again. Units
that are synced together have one record, in a file with the name of the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from clicklog.errors import BadInputError
from clicklog.files.atomic import Written, atomic_path, deferred, publish, read_json, write_json
from clicklog.files.validation import parse
from clicklog.readers.raw import DayFile, read_bytes
from clicklog.rows import BadRow, RawRows
from clicklog.versions import installed_version
from etl.parquet import write_tables
from etl.plan import Unit
from etl.results import LostRowsError, UnitResult, count_bits

#: Bad rows of a unit that its record describes; all of them are in its file of rejected rows.
DESCRIBED = 5
#: Packages of other versions may write other bytes.
_VERSIONS_OF = ("nvt-torchrec", "pyarrow", "numpy", "numba", "nvtabular", "pandas")
_ENDS = 1 << 20
#: What of a unit is the sum over its pieces.
_SUMS = ("rows", "bad_count", "positives", "dense_missing", "null", "oov")


#: Rows read (with labels), what is written for them, and int64 [categorical columns]:
#: out-of-vocabulary ids.
Piece: TypeAlias = tuple[RawRows, pa.Table, np.ndarray]


def finish_unit(unit: Unit, pieces: Iterable[Piece], parts: Path, work: Path) -> UnitResult:
    """Write a unit's part, its rejected rows and its record, durably and in this order.

    Takes and raises what :func:`write_unit` does.
    """
    result, written = write_unit(unit, pieces, parts, work)
    publish(written)
    record(work, [result])
    return result


def write_unit(
    unit: Unit, pieces: Iterable[Piece], parts: Path, work: Path
) -> tuple[UnitResult, list[Written]]:
    """Write a unit's part and its rejected rows, to be published before the unit is recorded.

    Args:
        unit: the unit.
        pieces: all rows of the unit in their order, in one or more pieces, which are taken as they
            are written; what raises in there leaves nothing behind.
        parts: directory of the splits' parts.
        work: directory of the run's state.

    Returns:
        What :func:`record` takes, and the files, which :func:`clicklog.files.atomic.publish` takes.

    Raises:
        OutputError: a file cannot be written.
    """
    tallies: list[UnitResult] = []
    bad: list[BadRow] = []

    def tables() -> Iterator[pa.Table]:
        lines = 0
        for rows, table, oov in pieces:
            tally = _tally(unit, rows, oov)
            tallies.append(tally)
            bad.extend(dataclasses.replace(one, line=lines + one.line) for one in rows.bad)
            lines += tally.lines
            yield table

    with deferred() as written:
        size = write_tables(tables(), parts / unit.file)
        if bad:
            _write_rejected(rejected_file(work, unit), bad)
    result = UnitResult(
        unit=unit,
        bad=[(one.line, one.what) for one in bad[:DESCRIBED]],
        size=size,
        **{name: sum(getattr(tally, name) for tally in tallies) for name in _SUMS},
    )
    return result, written


def _tally(unit: Unit, rows: RawRows, oov: np.ndarray) -> UnitResult:
    if rows.lines != len(rows) + rows.bad_count:
        raise LostRowsError(
            f"{unit.block.source}, bytes {unit.block.begin} to {unit.block.end}: {rows.lines} "
            f"lines, but {len(rows)} rows and {rows.bad_count} rejected ones",
            "this is a defect; nothing was written for them",
        )
    return UnitResult(
        unit=unit,
        rows=len(rows),
        bad_count=rows.bad_count,
        bad=[],
        positives=int(np.count_nonzero(rows.label)),
        size=0,
        dense_missing=count_bits(rows.dense_missing, len(rows.dense)),
        null=count_bits(rows.categorical_missing, len(rows.categorical)),
        oov=np.asarray(oov, np.int64),
    )


def record(work: Path, results: list[UnitResult]) -> None:
    """Write one record of units whose files are in place. Raises :class:`OutputError`."""
    first = results[0].unit
    path = work / "units" / f"{first.split}.{first.part}.json"
    write_json(path, [result.to_dict() for result in results])


def recorded(work: Path, units: Iterable[Unit]) -> list[UnitResult]:
    """The results of those units that are done, in the order given."""
    found: dict[str, dict[str, Any]] = {}
    for path in (work / "units").glob("*.json"):
        with contextlib.suppress(BadInputError, KeyError, TypeError):  # of a damaged disk
            found |= {one["unit"]: one for one in read_json(path, "the record of units")}
    results = []
    for unit in units:
        try:
            results.append(UnitResult.from_dict(found[unit.file], unit))
        except (KeyError, ValueError):  # not done, or a damaged disk
            continue
    return results


def rejected_file(work: Path, unit: Unit) -> Path:
    """Where a unit's rejected rows are: line in the unit, from 0; reason; the raw line."""
    return work / "rejected" / f"{unit.split}.{unit.part}.tsv"


def _write_rejected(path: Path, rows: list[BadRow]) -> None:
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        for bad in rows:
            text = bad.text.replace(b"\r", b"").replace(b"\n", b"\\n")
            file.write(b"%d\t%s\t%s\n" % (bad.line, bad.what.encode(), text))


def plan_record(settings: dict[str, Any], days: list[DayFile]) -> dict[str, Any]:
    """What a run depends on, in JSON: settings, inputs, versions of what writes the output."""
    versions = {name: installed_version(name) for name in _VERSIONS_OF}
    inputs = {day.path: fingerprint(day) for day in days}
    value = {"settings": settings, "inputs": inputs, "versions": versions}
    return json.loads(json.dumps(value))  # tuples are lists in there


@dataclasses.dataclass(frozen=True)
class _PlanRecord:
    settings: dict[str, Any]
    inputs: dict[str, dict[str, Any]]
    versions: dict[str, Any]


def read_plan_record(file: Path) -> dict[str, Any]:
    """What :func:`plan_record` gave when the run began. Raises :class:`BadInputError`."""
    value = read_json(file, "the record of an unfinished run")
    parse(_PlanRecord, value, file, "discard what the run did and begin again with --restart")
    return value


def fingerprint(day: DayFile) -> dict[str, Any]:
    """What tells that a file is still the same: size and time of change.

    Where a file system tells no time: a checksum of its first and last bytes.

    Raises:
        BadInputError: it cannot be read.
    """
    if day.modified is not None:
        return {"size": day.size, "modified": str(day.modified)}
    ends = {(0, min(day.size, _ENDS)), (max(0, day.size - _ENDS), day.size)}
    digest = hashlib.sha256(b"".join(read_bytes(day.path, *cut) for cut in sorted(ends)))
    return {"size": day.size, "sha256 of its ends": digest.hexdigest()}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is different between two plan records, one line for each."""
    old, new = _leaves(before), _leaves(now)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key in old and key in new:
            if old[key] != new[key]:
                lines.append(f"{_name(key)}: {old[key]!r} before, {new[key]!r} now")
            continue
        there, what = (old, "new") if key in new else (new, "no longer there")
        shared = max((_shared(key, other) for other in there), default=0)
        lines.append(f"{_name(key[: shared + 1])}: {what}")
    return list(dict.fromkeys(lines))


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many first steps of two paths are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _name(path: tuple[str, ...]) -> str:
    kind, *rest = path
    return " ".join(rest) if kind == "inputs" else ".".join(rest)


def _leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The leaves of nested dicts and lists by their path; columns go by their names."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        named = all(isinstance(one, dict) and "name" in one for one in value)
        items = [(one["name"] if named else str(i), one) for i, one in enumerate(value)]
    else:
        return {path: value}
    return {k: v for name, one in items for k, v in _leaves(one, (*path, str(name))).items()}
