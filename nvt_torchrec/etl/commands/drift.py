"""``python -m etl drift``: how a new day differs from the days that a workflow was fitted on."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.pages.charts import percent
from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.etl.settings import Thresholds, threads_flag
from nvt_torchrec.formats.day_names import day_text
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest

if TYPE_CHECKING:
    from nvt_torchrec.clicklog.readers.days import DayFile
    from nvt_torchrec.etl.day_drift import Drift
    from nvt_torchrec.etl.drift_cells import Measure

log = logging.getLogger(__name__)

#: For the command's help.
DESCRIPTION = (
    "Compares a raw day with the days that the workflow of OUT was fitted on: per column the "
    "population stability index, missing rate and share of unseen values, the label rate and the "
    "number of rows. Prints what drifted; writes all measures to day_N.json. Exit status: 0 if no "
    "measure is flagged, 3 if one is, 2 after an error."
)
#: The exit status of a day that is flagged.
DRIFTED = 3


@dataclasses.dataclass(frozen=True)
class DriftSettings(Settings):
    """The settings of ``python -m etl drift``, beside the thresholds."""

    output_path: Path = flag(
        "the output of `python -m etl run` or `extend`", metavar="OUT", positional=True
    )
    input: str = flag("raw file of the day; local or URL, compressed or not", metavar="RAW/day_N")
    output: Path | None = flag("directory of the result (default: OUT/drift)", None, metavar="DIR")
    all_columns: bool = flag("print the columns without drift as well", False)
    workers: int = threads_flag()


SETTINGS = (DriftSettings, Thresholds)


def run(settings: DriftSettings, thresholds: Thresholds) -> int:
    """Compare, print what drifted, write the result; return 3 if a measure is flagged, else 0.

    Of a day that the output was extended by, the result of the time when it was new is printed, and
    0 returned: now it would be compared with itself, and to add it was decided.

    Raises:
        ClickLogError: There is nothing to compare; see :func:`etl.day_drift.measure_drift`.
    """
    from nvt_torchrec.etl.day_drift import Drift, measure_drift, result_name
    from nvt_torchrec.etl.extend.claim import finish_switch
    from nvt_torchrec.etl.extend.day_checks import check_same_file

    output = EtlOutput(settings.output_path)
    finish_switch(output.root)
    day, manifest = find_day(settings.input), Manifest.read(output.manifest)
    days = {extension.day for extension in manifest.extensions}
    days &= {file.day for file in manifest.inputs}  # --keep_days leaves out old ones
    if added := day.day in days and settings.output is None:
        check_same_file(day, manifest, output.root)
        file = output.drift / f"{result_name(day.source)}.json"
        drift = Drift.read(file)
        log.info("%s was extended by %s: what was measured before", output.root, day.name)
    else:
        about = max(counts["rows"] for counts in manifest.by_day.values())
        with show_progress("drift", about) as bar:
            drift = measure_drift(
                output.root, day, thresholds=thresholds, workers=settings.workers, report=bar.update
            )
        file = drift.write(settings.output or output.drift)
    print(as_text(drift, all_columns=settings.all_columns))
    print(file)
    return DRIFTED if drift.flags and not added else 0


def find_day(path: str) -> DayFile:
    """Return the file of a day.

    Args:
        path: The file, or a directory with one day.

    Raises:
        BadInputError: There is no such file, it is empty, or a directory with several days.
    """
    from nvt_torchrec.clicklog.readers.days import find_days

    days = find_days(path)
    if len(days) > 1:
        raise BadInputError(
            f"--input {path}: {len(days)} days", f"name the file of one, such as {days[-1].source}"
        )
    return days[0]


def as_text(drift: Drift, *, all_columns: bool = False) -> str:
    """Return what drifted, a line on the rest, and how many measures are flagged.

    Args:
        drift: The comparison.
        all_columns: Whether measures of columns without drift have a line each as well.
    """
    first, last = (day_text(days(drift.baseline_days)) for days in (min, max))
    before = f"day {first}" if first == last else f"days {first} to {last}"
    lines = [f"{drift.input}: {drift.rows:,} rows, compared with {before}"]
    shown = [m for m in drift.measures if m.flagged or not m.column or all_columns]
    width = max((len(measure.title) for measure in shown), default=0)
    for measure in shown:
        mark = "  << drift" if measure.flagged else ""
        lines.append(f"  {measure.title:{width}}  {_changed(measure)}{mark}")
    drifted = {measure.column for measure in drift.measures if measure.flagged}
    indices = [m for m in drift.measures if m.name == "PSI" and m.column not in drifted]
    if indices and not all_columns:
        highest = max(indices, key=lambda psi: psi.change or 0.0)
        count = "1 column" if len(indices) == 1 else f"{len(indices)} columns"
        index = f"{_changed(highest)} of {highest.column}"
        lines.append(f"  {count} without drift; highest PSI {index}")
    of_all = f"of {len(drift.measures)} measures"
    flagged = f"drift: {len(drift.flags)} {of_all} are flagged"
    lines.append(flagged if drift.flags else f"no drift: none {of_all} is flagged")
    return "\n".join(lines)


def _changed(measure: Measure) -> str:
    """Return a PSI with its limit, or a measure before and now, as "10.0 % -> 12.5 %"."""
    if measure.name == "PSI":
        limit = "no limit" if measure.limit is None else f"limit {measure.limit:.4f}"
        return f"{measure.change:.4f} ({limit})"
    if measure.name == "rows":
        least, most = min(measure.then), max(measure.then)
        before = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return f"{before} -> {measure.now[0]:,}"
    shares = [
        percent(counts[0] / max(1, counts[1])) if counts else "?"
        for counts in (measure.then, measure.now)
    ]
    return " -> ".join(shares)
