"""``python -m etl drift``: how a new day differs from the days that a workflow was fitted on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.etl.settings import threads_flag
from nvt_torchrec.formats.etl_output import EtlOutput

#: For the command's help.
DESCRIPTION = (
    "Compares a raw day with the days that the workflow of OUT was fitted on: per column the "
    "population stability index, missing rate and share of unseen values, and the label rate. "
    "Prints the columns that drifted; writes all columns to day_N.json and a page day_N.html. Exit "
    "status: 0 if no measure exceeds its threshold, 3 if one does, 2 after an error."
)
#: The exit status of a day that exceeds a threshold.
DRIFTED = 3


@dataclasses.dataclass(frozen=True)
class DriftSettings(Settings):
    """The settings of ``python -m etl drift``."""

    output_path: Path = flag(
        "the output of `python -m etl run` or `extend`", metavar="OUT", positional=True
    )
    input: str = flag("raw file of the day; local or URL, compressed or not", metavar="RAW/day_N")
    thresholds: Path | None = flag(
        "TOML file of thresholds, see docs/drift.md (default: PSI 0.2, missing rate and unseen "
        "share 0.05, label rate 20 %)", None, metavar="FILE"
    )  # fmt: skip
    output: Path | None = flag("directory of the results (default: OUT/drift)", None, metavar="DIR")
    rows: int | None = flag(
        "compare the first N rows of the day only (default: all)", None, least=1
    )
    all_columns: bool = flag("print the columns without drift as well", False)
    workers: int = threads_flag()


SETTINGS = (DriftSettings,)


def run(settings: DriftSettings) -> int:
    """Compare, print what drifted, write the result; return 3 if a threshold is exceeded, else 0.

    Raises:
        ClickLogError: There is nothing to compare; see :func:`etl.drift.measure.measure_drift`.
    """
    from tqdm import tqdm

    from nvt_torchrec.etl.drift.measure import (
        check_not_added,
        find_day,
        measure_drift,
        write_result,
    )
    from nvt_torchrec.etl.drift.table import table
    from nvt_torchrec.etl.drift.thresholds import load_thresholds
    from nvt_torchrec.workflows.description import inspect

    output = EtlOutput(settings.output_path)
    output.check_whole()
    thresholds = None
    if settings.thresholds is not None:
        thresholds = load_thresholds(settings.thresholds, inspect(output.workflow).spec)
    day = find_day(settings.input)
    if settings.output is None:
        check_not_added(output, day)
    with tqdm(desc="drift", unit=" rows", unit_scale=True, disable=None) as bar:

        def report(rows: int, total: int | None) -> None:
            bar.total = total
            bar.update(rows)

        drift = measure_drift(
            settings.output_path,
            day,
            thresholds=thresholds,
            workers=settings.workers,
            limit_rows=settings.rows,
            report=report,
        )
    html, json = write_result(settings.output or output.drift, drift)
    print(table(drift, all_columns=settings.all_columns))
    print(f"{html}\n{json}")
    return DRIFTED if drift.flags else 0
