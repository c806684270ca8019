"""Runs that are killed with SIGKILL at chosen moments, and resumed until they finish.

``python -m tests.etl.killed DIRECTORY STRIDE`` prints what it saw as JSON. For moments
see ``tests/forks.py``: all are tried once the cuts by time are there, every tenth while files are
described, and every STRIDE-th of the others.
"""

from __future__ import annotations

import collections
import json
import logging
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nvt_torchrec.etl.run
from nvt_torchrec.etl.units.unit_plan import make_plan
from nvt_torchrec.formats.feature_spec.split import BY_DAYS, Split
from tests.etl.runs import QUARANTINE, settings, tree
from tests.etl.split_logs import SHARES_OF_TIME, spec_with, write
from tests.forks import kill_before, was_killed
from tests.logs import pack

#: Bad rows are rejected.
OPTIONS = {**QUARANTINE, "workers": 2}
ROWS = {0: 40, 1: 25, 2: 60}
BLOCK_BYTES = 800  # several blocks in a file
SPLITS = (SHARES_OF_TIME, BY_DAYS)


def stage_of(output: Path) -> str:
    """What a run is doing, or was when it was killed."""
    for stage, pattern in (
        ("finished", "manifest.json"), ("describe", "criteo_binary/split/*/part.*.parquet"),
        ("transform", ".work/*/fit.json"),
        ("fit", ".work/*/fit"), ("cut", ".work/*/cuts.json"),
        ("input", ".work/*/plan.json"),
    ):  # fmt: skip
        if any(output.glob(pattern)):
            return stage
    return "begin"


def attempt(
    raw: Path, output: Path, split: Split, log: Path, before_call: Callable[[], object]
) -> bool:
    """Run in a fork, which may go on with what is there; whether it was killed."""

    def work(begin: Callable[[], None]) -> None:
        handler = logging.FileHandler(log)
        handler.setFormatter(logging.Formatter("%(process)d %(message)s"))
        logging.getLogger("nvt_torchrec.etl").addHandler(handler)
        logging.getLogger("nvt_torchrec.etl").setLevel(logging.DEBUG)
        begin()
        nvt_torchrec.etl.run.run(settings(raw, output, spec_with(split), **OPTIONS))

    return was_killed(work, before_call)


def redone(log: Path) -> int:
    """The most units of an attempt that were begun again by a later one, over all attempts."""
    begun: dict[str, set[str]] = collections.defaultdict(set)
    for process, unit in re.findall(r"^(\d+) begin (.*)$", log.read_text(), re.MULTILINE):
        begun[process].add(unit)
    later: set[str] = set()
    most = 0
    for units in reversed(begun.values()):  # attempts in the order of their first line
        most = max(most, len(units & later))
        later |= units
    return most


def one_split(raw: Path, directory: Path, split: Split, stride: int) -> dict:
    """Kill runs at their moments, every third one again while it is resumed; what was seen."""
    directory.mkdir()
    output, log, file = directory / "out", directory / "log", directory / "moments"

    def note() -> None:
        with open(file, "a") as opened:
            opened.write(stage_of(output) + "\n")

    assert not attempt(raw, output, split, log, note)
    whole, chance = tree(output), random.Random(1)
    seen: dict = {"kills": collections.Counter(), "wrong": [], "redone": 0}
    for moment, stage in enumerate(file.read_text().split()):
        if moment % {"cut": 1, "describe": 10}.get(stage, stride):
            continue
        shutil.rmtree(output)
        log.unlink(missing_ok=True)
        if not attempt(raw, output, split, log, kill_before(1 + moment)):
            continue  # threads did fewer things this time
        seen["kills"][stage_of(output)] += 1
        if chance.randrange(3) == 0:
            attempt(raw, output, split, log, kill_before(1 + chance.randrange(60)))
        attempt(raw, output, split, log, lambda: None)
        found = tree(output)
        seen["wrong"] += [
            f"{moment}, {stage}: {name}"
            for name in sorted(whole.keys() | found.keys())
            if whole.get(name) != found.get(name)
        ]
        seen["redone"] = max(seen["redone"], redone(log))
    return seen


def main(directory: Path, stride: int) -> None:
    """Print, as JSON, for each split: kills by stage, wrong files, units redone."""
    raw = directory / "raw"
    write(raw, ROWS)
    with open(raw / "day_0.csv", "a") as first:
        first.write("bad row\n" * 3)
    pack(raw / "day_1.csv")

    def small_blocks(*arguments, **options):
        return make_plan(*arguments, **{**options, "block_bytes": BLOCK_BYTES})

    nvt_torchrec.etl.stages.make_plan = small_blocks
    for split in SPLITS:  # imports and compiles, here, before any fork
        warm = settings(raw, directory / f"warm_{split.by}", spec_with(split), **OPTIONS)
        nvt_torchrec.etl.run.run(warm)
    seen = {split.by: one_split(raw, directory / split.by, split, stride) for split in SPLITS}
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
