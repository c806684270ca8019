"""Finish after the last unit: store rejected rows, move the parts, account for every row."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow.parquet as pq

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.base.files.atomic import atomic_path, fsync_directory
from nvt_torchrec.clicklog.readers.log_format import get_format
from nvt_torchrec.clicklog.text.remedies import NUMBER_LABEL, may_leave_out
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.units.writing import LostRowsError, UnitResult, group_by_source, rejected_file
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.splits import SPLITS

log = logging.getLogger(__name__)

_REMEDY = "begin again with --restart; if the error repeats, it is a defect of this program"
#: Maximum number of rejected rows that an error describes.
_MAX_DESCRIBED = 5


def quarantine(
    results: list[UnitResult], settings: EtlSettings, work: Path, directory: Path
) -> None:
    """Write the bad rows of each input file to a file, with their file, line, reason and raw line.

    Args:
        results: The results of all units.
        settings: The settings of the run.
        work: The directory of the run's state.
        directory: The directory for the files; its content is deleted first. An extension later
            adds the files to those of earlier days, which keep their names.

    Raises:
        BadRowError: The share of bad rows is too large.
        OutputError: The directory cannot be written.
    """
    shutil.rmtree(directory, ignore_errors=True)
    spec = settings.spec
    final = EtlOutput(settings.output_path).rejected
    sources = group_by_source(results)
    names = Counter(Path(source).name for source in sources)
    for source, results_of_file in sources.items():
        if any(result.bad_count for result in results_of_file):
            name = Path(source).name
            # Files in different directories, or of earlier days, may have the same name.
            if names[name] > 1 or (final / f"{name}.tsv").exists():
                name = f"{results_of_file[0].unit.day}.{name}"
            _merge_rejected(directory / f"{name}.tsv", results_of_file, spec, work)
    bad = _count_bad(results)
    lines = sum(result.lines - result.done for result in results)
    if bad:
        log.info("%d of %d rows rejected: %s", bad, lines, final)
    if bad <= settings.max_bad_fraction * lines:
        return
    remedy = "correct the input, or allow more and run it again, which repeats no finished work"
    for result in results:
        if not all(may_leave_out(reason) for _, reason in result.bad):
            remedy = NUMBER_LABEL
    raise BadRowError(
        f"{bad} of {lines} rows ({bad / lines:.2%}) break the spec, more than "
        f"--max_bad_fraction {settings.max_bad_fraction}; {_describe_worst(results, spec)}",
        f"all of them are in {directory}; {remedy}",
    )


def _merge_rejected(path: Path, results: list[UnitResult], spec: FeatureSpec, work: Path) -> None:
    """Write the rejected rows of a file with line numbers of the file instead of its units."""
    source = results[0].unit.block.source.encode()
    with atomic_path(path) as temporary, open(temporary, "wb") as out:
        out.write(b"file\tline\treason\traw\n")
        for first, result in _add_first_lines(results, spec):
            if result.bad_count:
                with open(rejected_file(work, result.unit), "rb") as lines:
                    for line in lines:
                        number, rest = line.split(b"\t", 1)
                        out.write(b"%s\t%d\t%s" % (source, first + int(number), rest))


def _add_first_lines(
    results: list[UnitResult], spec: FeatureSpec
) -> Iterator[tuple[int, UnitResult]]:
    """Yield the results of a file in the order of its blocks, with the first line of the block."""
    first = get_format(spec).first_line(results[0].unit.block)
    for _, group in itertools.groupby(results, lambda result: result.unit.block):
        results_of_block = list(group)
        for result in results_of_block:
            yield first, result
        first += sum(result.lines for result in results_of_block)


def _count_bad(results: list[UnitResult]) -> int:
    return sum(result.bad_count for result in results)


def _describe_worst(results: list[UnitResult], spec: FeatureSpec) -> str:
    """Describe the file with the most bad rows, with the reasons of the first ones."""
    worst = max(group_by_source(results).values(), key=_count_bad)
    reasons = []
    for first, result in _add_first_lines(worst, spec):
        for line, reason in result.bad:
            reasons.append(f"\n  line {first + line}: {reason}")
    source = worst[0].unit.block.source
    lines = sum(result.lines for result in worst)
    described = "".join(reasons[:_MAX_DESCRIBED])
    return f"most in {source}, {_count_bad(worst)} of {lines}:{described}"


def number_parts(
    results: list[UnitResult], first_parts: Mapping[str, int] | None = None
) -> tuple[list[UnitResult], dict[str, str]]:
    """Renumber the existing parts, because a divided block has no part in a split without rows.

    Args:
        results: The results of all units, in the order of the plan.
        first_parts: The number of the first part of each split; None for 0.

    Returns:
        The results with new numbers, and old name → new name of each part.
    """
    next_parts = dict(first_parts or dict.fromkeys(SPLITS, 0))
    numbered = []
    names = {}
    for result in results:
        unit = result.unit
        if result.has_part:
            unit = dataclasses.replace(unit, part=next_parts[unit.split])
            next_parts[unit.split] += 1
            names[result.unit.file] = unit.file
        numbered.append(dataclasses.replace(result, unit=unit))
    return numbered, names


def check_splits(results: list[UnitResult], spec: FeatureSpec) -> None:
    """Raise :class:`BadInputError` if a division of rows leaves a split without rows."""
    if spec.split.by == "days":
        return
    rows = dict.fromkeys(SPLITS, 0)
    for result in results:
        rows[result.unit.split] += result.rows
    empty = [split for split, count in rows.items() if not count]
    if empty:
        counts = [f"{split} has {count:,}" for split, count in rows.items()]
        waiting = sum(result.waiting for result in results)
        if waiting:
            counts.append(f"{waiting:,} rows wait for their clicks")
        raise BadInputError(
            f"split by {spec.split.by}: no row for {', '.join(empty)}; {', '.join(counts)}",
            "choose other shares, times, files or values, or another column, in the spec's [split] "
            "(check its time_format), and begin again with --restart",
        )
    total = sum(rows.values())
    counts = [f"{split} {count:,} rows ({count / total:.2%})" for split, count in rows.items()]
    log.info("split by %s: %s", spec.split.by, ", ".join(counts))


def move_parts(parts: Path, split_root: Path, names: dict[str, str]) -> None:
    """Move all parts into the directory of the splits; skip parts that were moved already.

    Args:
        parts: The directory of the parts.
        split_root: The directory of the splits.
        names: Name in ``parts`` → name in ``split_root``.

    Raises:
        OSError: The directory cannot be written.
    """
    for split in SPLITS:
        (split_root / split).mkdir(parents=True, exist_ok=True)
    for file, name in names.items():
        with contextlib.suppress(FileNotFoundError):  # moved by an earlier process
            os.replace(parts / file, split_root / name)
    for split in SPLITS:
        fsync_directory(split_root / split)


def check_rows(results: list[UnitResult], split_root: Path) -> dict[str, tuple[int, str]]:
    """Check that every line of the input is in a part or rejected, reading the parts' footers.

    Returns:
        By part, its size in bytes and the digest of its footer.

    Raises:
        LostRowsError: A line is not accounted for.
    """
    from nvt_torchrec.base.parquet.footer import compute_footer_digest  # compiles kernels

    written = {}
    for result in results:
        if not result.has_part and not result.rows:
            continue
        path = split_root / result.unit.file
        try:
            rows = pq.read_metadata(path).num_rows
            written[result.unit.file] = (path.stat().st_size, compute_footer_digest(path))
        except (OSError, ValueError) as error:
            raise LostRowsError(f"{path}: cannot be read back: {error}", _REMEDY) from error
        if rows != result.rows:
            raise LostRowsError(f"{path}: {rows} rows, but {result.rows} were written", _REMEDY)
    for source, results_of_file in group_by_source(results).items():
        blocks = dict.fromkeys(result.unit.block for result in results_of_file)
        for before, after in itertools.pairwise(blocks):
            if before.end != after.begin:
                raise LostRowsError(
                    f"{source}: no block has the rows between {before.end} and {after.begin}",
                    _REMEDY,
                )
    return written
