"""``python -m etl drift``: how a new day differs from the days that a workflow was fitted on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.etl.settings import threads_flag
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.workflows.drift import Thresholds

if TYPE_CHECKING:
    from nvt_torchrec.clicklog.readers.days import DayFile
    from nvt_torchrec.workflows.drift import Drift, Measure

#: For the command's help.
DESCRIPTION = (
    "Compares a raw day with the days that the workflow of OUT was fitted on: per column the "
    "population stability index, missing rate and share of unseen values, the label rate and the "
    "number of rows. Prints the columns that drifted; writes all measures to day_N.json. Exit "
    "status: 0 if no measure is flagged, 3 if one is, 2 after an error."
)
#: The exit status of a day that is flagged.
DRIFTED = 3


@dataclasses.dataclass(frozen=True)
class DriftSettings(Settings):
    """The settings of ``python -m etl drift``, beside the thresholds."""

    HINTS: ClassVar = {
        "--thresholds": "thresholds are flags, such as --psi 0.25; --ignore leaves columns out",
        "--rows": "the whole day is compared; to compare its first rows, write them to a file",
    }

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

    Raises:
        ClickLogError: There is nothing to compare; see :func:`etl.drift.measure.measure_drift`.
    """
    from tqdm import tqdm

    from nvt_torchrec.etl.drift.measure import measure_drift

    output = EtlOutput(settings.output_path)
    output.check_whole()
    day = find_day(settings.input)
    if settings.output is None:
        _check_not_added(output, day)
    with tqdm(desc="drift", unit=" rows", unit_scale=True, disable=None) as bar:

        def report(rows: int, total: int | None) -> None:
            bar.total = total
            bar.update(rows)

        drift = measure_drift(
            settings.output_path,
            day,
            thresholds=thresholds,
            workers=settings.workers,
            report=report,
        )
    file = drift.write(settings.output or output.drift)
    print(as_text(drift, all_columns=settings.all_columns))
    print(file)
    return DRIFTED if drift.flags else 0


def find_day(path: str) -> DayFile:
    """Return the file of a day.

    Args:
        path: The file, or a directory with one day.

    Raises:
        BadInputError: There is no such file, or it is empty.
        SettingsError: It is a directory with several days.
    """
    from nvt_torchrec.clicklog.readers.days import find_days
    from nvt_torchrec.clicklog.readers.lines import filesystem_of

    filesystem, name = filesystem_of(path)
    if not filesystem.exists(name):
        remedy = "pass the raw file of a day, for example RAW/day_24"
        try:
            days = find_days(path.rstrip("/").rpartition("/")[0] or ".")
            remedy = f"the last day there is {days[-1].source}"
        except BadInputError:
            pass
        raise BadInputError(f"{path}: no such file", remedy)
    days = find_days(path)
    if len(days) > 1:
        raise SettingsError(
            f"--input {path} is a directory of {len(days)} days",
            f"name the file of one, for example {days[-1].source}",
        )
    return days[0]


def _check_not_added(output: EtlOutput, day: DayFile) -> None:
    """Check that a day is not one that the output was extended by.

    It would be compared with itself, and the result would replace the one of the time when the day
    was new, with which the unseen values of the next day are compared.

    Raises:
        SettingsError: The output was extended by this day.
    """
    from nvt_torchrec.formats.manifest import Manifest

    if not output.manifest.is_file():
        return  # which read_baseline reports
    added = {extension.day for extension in Manifest.read(output.manifest).extensions}
    if day.day in added:
        raise SettingsError(
            f"{output.root} was extended by {day.name}, so {day.source} would be compared with "
            f"itself; what was measured before is in {output.drift}",
            "to compare it all the same, choose another directory for the result with --output",
        )


def as_text(drift: Drift, *, all_columns: bool = False) -> str:
    """Return what drifted, a line on the rest, and how many measures are flagged.

    Args:
        drift: The comparison.
        all_columns: Whether columns without drift have a line each as well.
    """
    days = [f"{day}" for day in (drift.baseline_days[:1] + drift.baseline_days[1:][-1:])]
    names = f"days {' to '.join(days)}" if len(days) > 1 else f"day {days[0]}" if days else "no day"
    lines = [f"{drift.input}: {drift.rows:,} rows, compared with {names}"]
    columns: dict[str, dict[str, Measure]] = {}
    for measure in drift.measures:
        if measure.column:
            columns.setdefault(measure.column, {})[measure.name] = measure
        else:
            mark = "  << drift" if measure.flagged else ""
            lines.append(f"  {measure.name:15} {_changed(measure)}{mark}")
    rest = [name for name, of in columns.items() if not any(m.flagged for m in of.values())]
    shown = [name for name in columns if all_columns or name not in rest]
    if shown:
        width = max(len("column"), *map(len, shown))
        titles = f"{'column':{width}} {'PSI':>7} {'limit':>7}  {'missing':>19}  {'unseen':>19}"
        lines += ["", f"  {titles}", *(_line(name, width, columns[name]) for name in shown), ""]
    if rest and not all_columns:
        highest = max((columns[name]["PSI"] for name in rest), key=lambda psi: psi.change or 0.0)
        limit = "no limit" if highest.limit is None else f"limit {highest.limit:.4f}"
        count = "1 column" if len(rest) == 1 else f"{len(rest)} columns"
        lines.append(
            f"  {count} without drift; highest PSI {highest.change:.4f} of {highest.column} "
            f"({limit})"
        )
    if drift.flags:
        lines.append(f"drift: {len(drift.flags)} of {len(drift.measures)} measures are flagged")
    else:
        lines.append(f"no drift: none of {len(drift.measures)} measures is flagged")
    return "\n".join(lines)


def _line(name: str, width: int, measures: dict[str, Measure]) -> str:
    psi, missing, unseen = (measures.get(m) for m in ("PSI", "missing rate", "unseen share"))
    assert psi is not None
    assert missing is not None
    limit = "      -" if psi.limit is None else f"{psi.limit:7.4f}"
    cells = f"{_changed(missing):>19}  {'-' if unseen is None else _changed(unseen):>19}"
    flags = ", ".join(measure.name for measure in measures.values() if measure.flagged)
    mark = f"  << {flags}" if flags else ""
    return f"  {name:{width}} {psi.change:7.4f} {limit}  {cells}{mark}"


def _changed(measure: Measure) -> str:
    """Return a measure before and now, as "10.0 % -> 12.5 %"."""
    from nvt_torchrec.base.pages.formats import percent

    if measure.name == "rows":
        least, most = min(measure.then), max(measure.then)
        before = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return f"{before} -> {measure.now[0]:,}"
    shares = [percent(of[0] / max(1, of[1])) if of else "?" for of in (measure.then, measure.now)]
    return " -> ".join(shares)
