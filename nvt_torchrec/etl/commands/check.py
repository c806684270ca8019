"""``python -m etl check``: verify an output."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.etl.check.check_files import ERROR, NOTE, WARNING, Finding
from nvt_torchrec.etl.settings import threads_flag

#: For the command's help.
DESCRIPTION = (
    "Verify an output of `python -m etl run` or `extend`, and print a line for each finding. Exit "
    "status: 0 if there are at most notes, 1 if there are errors or warnings, 2 if OUT holds no "
    "output to check."
)
#: Findings of one kind that are printed; more are only counted.
_MAX_SHOWN = 20


def check(
    path: Path | str, *, workers: int = 1, report: Callable[[int, int], object] | None = None
) -> list[Finding]:
    """Check an output directory; return the findings, errors first.

    Args:
        path: OUT of a run.
        workers: Number of reading threads.
        report: Called with the rows read since the last call, and the rows of all files.

    Raises:
        BadInputError: ``path`` holds no output, or an extension is just replacing it.
    """
    from nvt_torchrec.etl.check import check_files as files
    from nvt_torchrec.etl.check import check_rows as rows

    output = files.find(Path(path))
    files.check_files(output)
    if output.manifest is not None:
        rows.read_parts(output, workers=workers, report=report)
    order = {ERROR: 0, WARNING: 1, NOTE: 2}
    # Threads add findings in any order.
    return sorted(output.findings, key=lambda finding: (order[finding.severity], str(finding)))


@dataclasses.dataclass(frozen=True)
class CheckSettings(Settings):
    """The settings of ``python -m etl check``."""

    output: Path = flag("the directory to check", metavar="OUT", positional=True)
    workers: int = threads_flag()


SETTINGS = (CheckSettings,)


def run(settings: CheckSettings) -> int:
    """Print the findings; return 0 if all of them are notes, else 1.

    Raises:
        BadInputError: The directory holds no output.
    """
    with show_progress("check") as bar:

        def report(rows: int, total: int) -> None:
            bar.total = total
            bar.update(rows)

        findings = check(settings.output, workers=settings.workers, report=report)
    shown: Counter = Counter()
    for finding in findings:
        shown[finding.kind] += 1
        if shown[finding.kind] <= _MAX_SHOWN:
            print(finding)
    for kind, count in shown.items():
        if count > _MAX_SHOWN:
            print(f"{kind}: {count - _MAX_SHOWN} more findings like these")
    severities = Counter(finding.severity for finding in findings)
    bad = severities[ERROR] + severities[WARNING]
    summary = "no problems found"
    if bad:
        summary = f"{severities[ERROR]} errors, {severities[WARNING]} warnings"
    print(f"{settings.output}: {summary}")
    return 1 if bad else 0
