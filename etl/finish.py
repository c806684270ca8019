"""After the last unit: reject bad rows, move the parts into place, account for every row."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq

from clicklog.errors import BadRowError
from clicklog.files.atomic import atomic_path, fsync_directory
from clicklog.readers.raw import first_line
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.splits import SPLITS
from etl.plan import Plan, Unit
from etl.results import LostRowsError, UnitResult, by_source
from etl.state import rejected_file

log = logging.getLogger(__name__)


def quarantine(
    results: list[UnitResult],
    spec: FeatureSpec,
    work: Path,
    directory: Path,
    most: float,
    shown: Path | None = None,
) -> None:
    """Write the file, line, reason and raw line of bad rows: a file for each input file.

    Args:
        results: of all units.
        spec: of the input.
        work: directory of the run's state.
        directory: for the files; what it holds is deleted.
        most: the largest share of bad rows that is accepted.
        shown: where the files will be in the end, for the log; None: in ``directory``.

    Raises:
        BadRowError: the share of bad rows is larger.
        OutputError: the directory cannot be written.
    """
    shutil.rmtree(directory, ignore_errors=True)
    for source, own in by_source(results).items():
        if any(result.bad_count for result in own):
            first = first_line(own[0].unit.block, spec)
            _merge_rejected(directory / f"{Path(source).name}.tsv", first, own, work)
    bad = sum(result.bad_count for result in results)
    lines = sum(result.lines for result in results)
    if bad:
        log.info("%d of %d rows rejected: %s", bad, lines, shown or directory)
    if bad > most * lines:
        raise BadRowError(
            f"{bad} of {lines} rows ({bad / lines:.2%}) break the spec, more than "
            f"--max_bad_fraction {most}; {_worst(results, spec)}",
            f"all of them are in {directory}; correct the input, or allow more: --resume "
            "repeats no finished work",
        )


def _merge_rejected(path: Path, first: int, results: list[UnitResult], work: Path) -> None:
    source = results[0].unit.block.source.encode()
    with atomic_path(path) as temporary, open(temporary, "wb") as out:
        out.write(b"file\tline\treason\traw\n")
        for result in results:
            if result.bad_count:
                with open(rejected_file(work, result.unit), "rb") as lines:
                    for line in lines:
                        number, rest = line.split(b"\t", 1)
                        out.write(b"%s\t%d\t%s" % (source, first + int(number), rest))
            first += result.lines


def _worst(results: list[UnitResult], spec: FeatureSpec) -> str:
    """The file with the most bad rows, and the reasons of the first of them."""
    own = max(by_source(results).values(), key=lambda own: sum(r.bad_count for r in own))
    bad = sum(result.bad_count for result in own)
    lines = sum(result.lines for result in own)
    source = own[0].unit.block.source
    reasons, first = [], first_line(own[0].unit.block, spec)
    for result in own:
        reasons += [f"\n  line {first + line}: {what}" for line, what in result.bad]
        first += result.lines
    return f"most in {source}, {bad} of {lines}:{''.join(reasons[:5])}"


def move_parts(parts: Path, split_root: Path, files: list[str]) -> None:
    """Move all parts into the directory of the splits; those that are there already stay.

    Raises:
        OSError: the directory cannot be written.
    """
    for split in SPLITS:
        (split_root / split).mkdir(parents=True, exist_ok=True)
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # moved by an earlier process
            os.replace(parts / file, split_root / file)
    for split in SPLITS:
        fsync_directory(split_root / split)


def check_rows(plan: Plan, results: list[UnitResult], split_root: Path) -> dict[str, int]:
    """Check by the parts' footers that every line of the input is in a part or rejected.

    Returns:
        Bytes of each part.

    Raises:
        LostRowsError: a line is not accounted for.
    """
    if [result.unit for result in results] != plan.units:
        raise LostRowsError(f"{len(results)} of {len(plan.units)} units are done", _REMEDY)
    sizes = {}
    for result in results:
        path = split_root / result.unit.file
        try:
            rows = pq.read_metadata(path).num_rows
            sizes[result.unit.file] = path.stat().st_size
        except (OSError, ValueError) as error:
            raise LostRowsError(f"{path}: cannot be read back: {error}", _REMEDY) from error
        if rows != result.rows:
            raise LostRowsError(f"{path}: {rows} rows, {result.rows} were written", _REMEDY)
    for source, own in by_source(results).items():
        _check_tiling(source, [result.unit for result in own])
    return sizes


def _check_tiling(source: str, units: list[Unit]) -> None:
    for before, after in itertools.pairwise(units):
        if before.block.end != after.block.begin:
            raise LostRowsError(
                f"{source}: a gap between {before.block.end} and {after.block.begin}", _REMEDY
            )


_REMEDY = "begin again with --restart; if the error repeats, it is a defect of this program"
