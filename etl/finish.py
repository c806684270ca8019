"""After the last unit: reject bad rows, move the parts into place, account for every row."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.base.files.atomic import atomic_path, fsync_directory
from nvt_torchrec.clicklog.readers.raw import first_line
from nvt_torchrec.etl.plan import Plan, Unit
from nvt_torchrec.etl.results import LostRowsError, UnitResult, by_source
from nvt_torchrec.etl.state import rejected_file
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.splits import SPLITS

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
        shown: where the files will be in the end, beside those of earlier days, which keep their
            names; None: in ``directory``.

    Raises:
        BadRowError: the share of bad rows is larger.
        OutputError: the directory cannot be written.
    """
    shutil.rmtree(directory, ignore_errors=True)
    sources = by_source(results)
    names = Counter(Path(source).name for source in sources)
    for source, group in sources.items():
        if any(result.bad_count for result in group):
            first = first_line(group[0].unit.block, spec)
            name = Path(source).name
            taken = shown is not None and (shown / f"{name}.tsv").exists()  # by an earlier day
            if names[name] > 1 or taken:  # files of several directories
                name = f"{group[0].unit.day}.{name}"
            _merge_rejected(directory / f"{name}.tsv", first, group, work)
    bad = sum(result.bad_count for result in results)
    lines = sum(result.lines for result in results)
    if bad:
        log.info("%d of %d rows rejected: %s", bad, lines, shown or directory)
    if bad > most * lines:
        raise BadRowError(
            f"{bad} of {lines} rows ({bad / lines:.2%}) break the spec, more than "
            f"--max_bad_fraction {most}; {_worst(results, spec)}",
            f"all of them are in {directory}; correct the input, or run it again "
            "and allow more, which repeats no finished work",
        )


def _merge_rejected(path: Path, first: int, results: list[UnitResult], work: Path) -> None:
    source = results[0].unit.block.source.encode()
    with atomic_path(path) as temporary, open(temporary, "wb") as out:
        out.write(b"file\tline\treason\traw\n")
        for group in _by_block(results):
            for result in group:
                if result.bad_count:
                    with open(rejected_file(work, result.unit), "rb") as lines:
                        for line in lines:
                            number, rest = line.split(b"\t", 1)
                            out.write(b"%s\t%d\t%s" % (source, first + int(number), rest))
            first += sum(result.lines for result in group)


def _by_block(results: list[UnitResult]) -> list[list[UnitResult]]:
    """The results of each block together; ``results`` are in the order of the blocks."""
    return [
        list(group) for _, group in itertools.groupby(results, lambda result: result.unit.block)
    ]


def _worst(results: list[UnitResult], spec: FeatureSpec) -> str:
    """The file with the most bad rows, and the reasons of the first of them."""
    group = max(by_source(results).values(), key=lambda group: sum(r.bad_count for r in group))
    bad = sum(result.bad_count for result in group)
    lines = sum(result.lines for result in group)
    source = group[0].unit.block.source
    reasons, first = [], first_line(group[0].unit.block, spec)
    for of_block in _by_block(group):
        for result in of_block:
            reasons += [f"\n  line {first + line}: {what}" for line, what in result.bad]
        first += sum(result.lines for result in of_block)
    return f"most in {source}, {bad} of {lines}:{''.join(reasons[:5])}"


def without_empty_parts(
    plan: Plan, results: list[UnitResult], first_parts: Mapping[str, int] | None = None
) -> tuple[Plan, list[UnitResult], dict[str, str]]:
    """Number the parts that there are; a divided block has none for a split without rows.

    Args:
        plan: All units.
        results: Of all units, in the order of the plan.
        first_parts: The number of the first part of each split; None for 0.

    Returns:
        The plan and the results with these numbers, and the new name of each part by its old one.
    """
    _check_units(plan, results)
    next_parts = dict(first_parts or dict.fromkeys(SPLITS, 0))
    units, names = [], {}
    for result in results:
        unit = result.unit
        if result.has_part:
            unit = dataclasses.replace(unit, part=next_parts[unit.split])
            next_parts[unit.split] += 1
            names[result.unit.file] = unit.file
        units.append(unit)
    numbered = [
        dataclasses.replace(result, unit=unit) for result, unit in zip(results, units, strict=True)
    ]
    return dataclasses.replace(plan, units=units), numbered, names


def check_splits(results: list[UnitResult], spec: FeatureSpec) -> None:
    """Check that a division of rows leaves rows in each split. Raises :class:`BadInputError`."""
    if spec.split.by == "days":
        return
    rows = dict.fromkeys(SPLITS, 0)
    for result in results:
        rows[result.unit.split] += result.rows
    empty = [split for split, count in rows.items() if not count]
    if empty:
        raise BadInputError(
            f"split by {spec.split.by}: no row for {', '.join(empty)}; "
            + ", ".join(f"{split} has {count:,}" for split, count in rows.items()),
            "choose other shares, times, files or another column in the spec's [split] (check its "
            "time_format), and begin again with --restart",
        )
    total = sum(rows.values())
    counts = [f"{split} {count:,} rows ({count / total:.2%})" for split, count in rows.items()]
    log.info("split by %s: %s", spec.split.by, ", ".join(counts))


def move_parts(parts: Path, split_root: Path, names: dict[str, str]) -> None:
    """Move all parts into the directory of the splits; those that are there already stay.

    Args:
        parts: Where they are.
        split_root: Where they go.
        names: Their names there, by their names here.

    Raises:
        OSError: the directory cannot be written.
    """
    for split in SPLITS:
        (split_root / split).mkdir(parents=True, exist_ok=True)
    for file, name in names.items():
        with contextlib.suppress(FileNotFoundError):  # moved by an earlier process
            os.replace(parts / file, split_root / name)
    for split in SPLITS:
        fsync_directory(split_root / split)


def check_rows(plan: Plan, results: list[UnitResult], split_root: Path) -> dict[str, int]:
    """Check by the parts' footers that every line of the input is in a part or rejected.

    Returns:
        Bytes of each part.

    Raises:
        LostRowsError: a line is not accounted for.
    """
    _check_units(plan, results)
    sizes = {}
    for result in results:
        if not result.has_part and not result.rows:
            continue
        path = split_root / result.unit.file
        try:
            rows = pq.read_metadata(path).num_rows
            sizes[result.unit.file] = path.stat().st_size
        except (OSError, ValueError) as error:
            raise LostRowsError(f"{path}: cannot be read back: {error}", _REMEDY) from error
        if rows != result.rows:
            raise LostRowsError(f"{path}: {rows} rows, {result.rows} were written", _REMEDY)
    for source, group in by_source(results).items():
        _check_tiling(source, [result.unit for result in group])
    return sizes


def _check_units(plan: Plan, results: list[UnitResult]) -> None:
    if [result.unit for result in results] != plan.units:
        raise LostRowsError(f"{len(results)} of {len(plan.units)} units are done", _REMEDY)


def _check_tiling(source: str, units: list[Unit]) -> None:
    blocks = list(dict.fromkeys(unit.block for unit in units))
    for before, after in itertools.pairwise(blocks):
        if before.end != after.begin:
            raise LostRowsError(f"{source}: a gap between {before.end} and {after.begin}", _REMEDY)


_REMEDY = "begin again with --restart; if the error repeats, it is a defect of this program"
