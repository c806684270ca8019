"""Runs of the ETL that are killed with SIGKILL at chosen moments, and resumed until they finish.

``python -m tests.etl.killed DIRECTORY ROUNDS`` prints what it saw as JSON. Each attempt is a fork
of one process that has imported and compiled everything, so that the moments fall into the work.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import logging
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

from nvt_torchrec.etl.run import run
from tests.etl.runs import settings, tree
from tests.forks import fork
from tests.logs import random_rows, write_day

WORKERS = 2
#: Kills in each round before it may finish.
KILLS = 3
VARIANTS = (
    {},
    {"on_bad_rows": "quarantine"},
    {"shuffle": "full", "seed": 5},
)


def make_log(directory: Path) -> Path:
    """Four days of some units, one of them compressed, with bad rows."""
    rows = random_rows(300, 0)
    for day, times in enumerate((30, 10, 20, 16)):
        write_day(directory / f"day_{day}", rows * times)
    with open(directory / "day_0", "a") as file:
        file.write("bad row\n" * 3)
    text = (directory / "day_1").read_bytes()
    (directory / "day_1").unlink()
    (directory / "day_1.gz").write_bytes(gzip.compress(text, 1))
    return directory


def attempt(raw: Path, output: Path, log: Path, **options) -> int:
    """Start an attempt in a process group of its own; its id."""

    def work() -> None:
        handler = logging.FileHandler(log)
        handler.setFormatter(logging.Formatter("%(process)d %(message)s"))
        logging.getLogger("nvt_torchrec.etl").addHandler(handler)
        logging.getLogger("nvt_torchrec.etl").setLevel(logging.DEBUG)
        run(settings(raw, output, workers=WORKERS, block_mb=1, **options))

    return fork(work)


def killed_after(child: int, seconds: float) -> bool:
    """Kill an attempt's process group after a while, unless it has finished by then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                raise SystemExit(f"an attempt failed with {status}")
            return False
        time.sleep(0.002)
    # It may end at this very moment: not waited for yet, its process is there, its group not.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def redone(log: Path) -> int:
    """The most units of an attempt that were begun again by a later one, over all attempts."""
    begun: dict[str, set[str]] = collections.defaultdict(set)
    for line in log.read_text().splitlines():
        if match := re.fullmatch(r"(\d+) begin (.*)", line):
            begun[match[1]].add(match[2])
    later: set[str] = set()
    most = 0
    for units in reversed(begun.values()):  # attempts in the order of their first line
        most = max(most, len(units & later))
        later |= units
    return most


def one_round(raw: Path, directory: Path, options: dict, moments: list[float]) -> dict:
    """Kill a run at these moments, finish it, compare; what was seen."""
    output, log = directory / "out", directory / "log"
    shutil.rmtree(output, ignore_errors=True)
    log.write_text("")
    kills, stages = 0, []
    for moment in moments:
        kills += killed_after(attempt(raw, output, log, **options), moment)
        stages.append(_stage_of(output))
    assert not killed_after(attempt(raw, output, log, **options), 600)
    return {"kills": kills, "stages": stages, "redone": redone(log), "tree": tree(output)}


def _stage_of(output: Path) -> str:
    """What a killed run was doing."""
    for stage, pattern in (
        ("finished", "manifest.json"), ("describe", "criteo_binary/split/train/part.0.parquet"),
        ("shuffle", ".work/*/shuffle"), ("transform", ".work/*/fit.json"),
        ("fit", ".work/*/cuts.json"), ("input", ".work/*/plan.json"), ("begin", ".unfinished"),
    ):  # fmt: skip
        if any(output.glob(pattern)):
            return stage
    return "nothing"


def main(directory: Path, rounds: int) -> None:
    """Print, as JSON: kills, how many in which stage, units redone, outputs that differ."""
    raw = make_log(directory / "raw")
    for i, variant in enumerate(VARIANTS):  # imports and compiles, here, before any fork
        options = {"on_bad_rows": "quarantine", **variant}
        run(settings(raw, directory / f"warm_{i}", workers=WORKERS, **options))
    chance = random.Random(1)
    summary = {"kills": 0, "stages": collections.Counter(), "redone": [], "different": []}
    for variant in VARIANTS:
        options = {"on_bad_rows": "quarantine", **variant}
        whole = one_round(raw, directory, options, [])
        timings = json.loads((directory / "out" / "timings.json").read_text())["seconds"]
        # without the report, the drawing of which takes as long as all the rest
        most = 1.2 * sum(timings.values())
        for i in range(rounds):
            first = most * (i + chance.random()) / rounds
            moments = [first, *(chance.uniform(0, most - first) for _ in range(KILLS - 1))]
            seen = one_round(raw, directory, options, moments)
            summary["kills"] += seen["kills"]
            summary["stages"].update(seen["stages"])
            summary["redone"].append(seen["redone"])
            for name in whole["tree"].keys() | seen["tree"].keys():
                if whole["tree"].get(name) != seen["tree"].get(name):
                    summary["different"].append(name)
    print(json.dumps(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
