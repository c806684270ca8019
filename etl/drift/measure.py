"""Measure the drift of a day and write the result, for the commands ``drift`` and ``extend``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.files.atomic import write_text
from nvt_torchrec.clicklog.readers.days import DayFile, find_days
from nvt_torchrec.clicklog.readers.lines import filesystem_of
from nvt_torchrec.etl.drift.artifact import Drift, result_name, write_drift
from nvt_torchrec.etl.drift.baseline import read_baseline
from nvt_torchrec.etl.drift.compare import compare
from nvt_torchrec.etl.drift.page import page
from nvt_torchrec.etl.drift.tally import tally_day
from nvt_torchrec.etl.drift.thresholds import Thresholds
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest


def measure_drift(
    output: Path,
    day: DayFile,
    *,
    thresholds: Thresholds | None = None,
    workers: int = 1,
    limit_rows: int | None = None,
    report: Callable[[int, int | None], object] = lambda rows, total: None,
) -> Drift:
    """Compare a day with what the workflow of an output was fitted on.

    The day is read once; nothing is written. The result depends neither on the number of threads
    nor on whether the day is compressed.

    Args:
        output: The output directory of `etl run` or `etl extend`.
        day: The raw file, compressed or not.
        thresholds: What may change; by default see :class:`etl.drift.thresholds.Thresholds`.
        workers: The number of threads.
        limit_rows: How many rows to read, from the first one on; None for all.
        report: Called with the rows read since the last call, and an estimate of all rows or None.

    Raises:
        BadInputError: The output is not finished, or a file is missing, damaged, of other columns,
            or without a well-formed row.
        BadRowError: The lines of the day have another number of fields than the spec.
        SchemaError: The workflow is of another version, or not that of the manifest.
    """
    baseline = read_baseline(output)
    tally = tally_day(day, baseline, workers=workers, limit_rows=limit_rows, report=report)
    chosen = Thresholds() if thresholds is None else thresholds
    return compare(day, name_of(day), tally, baseline, chosen, limit_rows)


def name_of(day: DayFile) -> str:
    """Return the name of the result of a day; see :func:`etl.drift.artifact.result_name`."""
    return result_name(day.source)


def write_result(directory: Path, drift: Drift) -> tuple[Path, Path]:
    """Write a result as page and as JSON, which is written last; return their paths.

    Raises:
        OutputError: The directory cannot be written.
    """
    html, json = (directory / f"{drift.name}.{ending}" for ending in ("html", "json"))
    write_text(html, page(drift))
    write_drift(json, drift)
    return html, json


def find_day(path: str) -> DayFile:
    """Return the file of a day.

    Args:
        path: The file, or a directory with one day.

    Raises:
        BadInputError: There is no such file, or it is empty.
        SettingsError: It is a directory with several days.
    """
    filesystem, name = filesystem_of(path)
    if not filesystem.exists(name):
        raise BadInputError(f"{path}: no such file", _others(path))
    days = find_days(path)
    if len(days) > 1:
        raise SettingsError(
            f"--input {path} is a directory of {len(days)} days",
            f"name the file of one, for example {days[-1].source}",
        )
    return days[0]


def check_not_added(output: EtlOutput, day: DayFile) -> None:
    """Check that a day is not one that the output was extended by.

    It would be compared with itself, and the result would replace the one of the time when the day
    was new, with which the unseen values of the next day are compared.

    Raises:
        SettingsError: The output was extended by this day.
    """
    if not output.manifest.is_file():
        return  # which read_baseline reports
    added = {extension.day for extension in Manifest.read(output.manifest).extensions}
    if day.day in added:
        raise SettingsError(
            f"{output.root} was extended by {day.name}, so {day.source} would be compared with "
            f"itself; what was measured before is in {output.drift}",
            "to compare it all the same, choose another directory for the result with --output",
        )


def _others(path: str) -> str:
    """Say which days are in the directory of a file that is not there."""
    try:
        days = find_days(path.rstrip("/").rpartition("/")[0] or ".")
    except BadInputError:
        return "pass the raw file of a day, for example RAW/day_24"
    return f"the last day there is {days[-1].source}"
