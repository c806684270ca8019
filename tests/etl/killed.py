"""Runs that are killed with SIGKILL at chosen moments, and resumed until they finish.

``python -m tests.etl.killed DIRECTORY STRIDE`` prints what it saw as JSON. For moments
see ``tests/forks.py``: every second one while times are counted is tried, all while their records
make place for the cuts, and every STRIDE-th of the others.
"""

from __future__ import annotations

import collections
import gzip
import json
import logging
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nvt_torchrec.etl.run
from nvt_torchrec.etl.plan import make_plan
from nvt_torchrec.formats.spec.columns import CategoricalColumn, DenseColumn, InputFormat
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.split import BY_DAYS, Split
from tests.etl.runs import settings, tree
from tests.forks import kill_before, was_killed

WORKERS = 2
ROWS = (40, 25, 60)
BLOCK_BYTES = 400  # several blocks in a file
BY_TIME = Split("time", column="when", time_format="epoch_s", valid=0.1, test=0.2)
SPLITS = (
    BY_TIME,
    Split("share", valid=0.2, test=0.1, seed=7),
    Split("column", column="user", valid=0.2, test=0.2, seed=1),
    BY_DAYS,
)


def spec_of(split: Split) -> FeatureSpec:
    """The columns of :func:`write_log`."""
    return FeatureSpec(
        "label",
        (DenseColumn("count"),),
        (CategoricalColumn("item", raw="string"),),
        input=InputFormat(format="csv", header=True),
        split=split,
    )


def write_log(directory: Path, files: tuple[int, ...] = ROWS) -> None:
    """Files of rows in no order of time."""
    directory.mkdir(parents=True)
    rng = random.Random(0)
    for file, rows in enumerate(files):
        lines = [
            f"{rng.randrange(2)},{rng.randrange(99)},i{rng.randrange(9)},u{rng.randrange(40)},"
            f"{rng.randrange(10**6)}\n"
            for _ in range(rows)
        ]
        text = "".join(["label,count,item,user,when\n", *lines])
        (directory / f"part-{file}.csv").write_text(text)


def stage_of(output: Path) -> str:
    """What a run is doing, or was when it was killed."""
    for stage, pattern in (
        ("finished", "manifest.json"), ("describe", "criteo_binary/split/*/part.*.parquet"),
        ("shuffle", ".work/*/shuffle"), ("transform", ".work/*/fit.json"),
        ("fit", ".work/*/fit"), ("cut", ".work/*/times/cuts.json"),
        ("times", ".work/*/times"), ("input", ".work/*/plan.json"),
    ):  # fmt: skip
        if any(output.glob(pattern)):
            return stage
    return "begin"


def options_of(split: Split) -> dict:
    """Bad rows are rejected; the training rows of a run by days are shuffled."""
    shuffled = {"shuffle": "full", "seed": 5} if split == BY_DAYS else {}
    return {"on_bad_rows": "quarantine", "max_bad_fraction": 0.5, "workers": WORKERS, **shuffled}


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
        nvt_torchrec.etl.run.run(settings(raw, output, spec_of(split), **options_of(split)))

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
        if moment % {"times": 2, "cut": 1}.get(stage, stride):
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
    write_log(raw)
    with open(raw / "part-0.csv", "a") as first:
        first.write("bad row\n" * 3)
    middle = raw / "part-1.csv"
    (raw / "part-1.csv.gz").write_bytes(gzip.compress(middle.read_bytes()))
    middle.unlink()

    def small_blocks(*arguments, **options):
        return make_plan(*arguments, **{**options, "block_bytes": BLOCK_BYTES})

    nvt_torchrec.etl.stages.make_plan = small_blocks
    for split in SPLITS:  # imports and compiles, here, before any fork
        warm = settings(raw, directory / f"warm_{split.by}", spec_of(split), **options_of(split))
        nvt_torchrec.etl.run.run(warm)
    seen = {split.by: one_split(raw, directory / split.by, split, stride) for split in SPLITS}
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
