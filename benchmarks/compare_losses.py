"""Compare the training losses of runs with those of the first run: ``LOG OTHER_LOG …``.

Each argument is the ``--log_path`` of a run that reported every step. The exit status is 1 if a run
is missing, has another number of steps, or a loss that differs by more than ``--tolerance``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nvt_torchrec.training.reporting.metrics_log import METRICS_FILE
from nvt_torchrec.training.reporting.page import read_events


def read_losses(log: Path) -> list[float]:
    """Return the losses of a run's steps; an empty list if it has no metrics.jsonl."""
    file = log / METRICS_FILE
    if not file.is_file():
        return []
    return [event["loss"] for event in read_events(file) if event["event"] == "train"]


def main() -> int:
    """Print a line for each run after the first."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    args = parser.parse_args()
    first, *others = args.logs
    expected = read_losses(first)
    status = 0
    for log in others:
        found = read_losses(log)
        if not expected or len(found) != len(expected):
            print(f"FAILED {log.name}: {len(found)} steps, {first.name} has {len(expected)}")
            status = 1
            continue
        difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        verdict = "passed" if difference <= args.tolerance else "FAILED"
        print(f"{verdict} {log.name}: losses differ by at most {difference:.2g}")
        if verdict == "FAILED":
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
