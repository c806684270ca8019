"""Runs that divide rows, killed with SIGKILL at chosen moments and resumed until they finish.

``python -m tests.etl.killed_split DIRECTORY STRIDE`` prints what it saw as JSON. For moments
see ``tests/forks.py``: every second one while times are counted is tried, all while their records
make place for the cuts, and every STRIDE-th of the others.
"""

from __future__ import annotations

import collections
import json
import logging
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nvt_torchrec.etl.run
from nvt_torchrec.etl.plan import make_plan
from nvt_torchrec.formats.spec.columns import CategoricalColumn, DenseColumn, InputFormat
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.split import Split
from tests.etl.runs import settings, tree
from tests.forks import kill_before, was_killed

WORKERS = 2
ROWS = (40, 25, 60)
BLOCK_BYTES = 400  # several blocks in a file
SPLITS = (
    Split("time", column="when", time_format="epoch_s", valid=0.1, test=0.2),
    Split("share", valid=0.2, test=0.1, seed=7),
    Split("column", column="user", valid=0.2, test=0.2, seed=1),
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
        ("transform", ".work/*/fit.json"), ("fit", ".work/*/cuts.json"),
        ("cut", ".work/*/times/cuts.json"), ("times", ".work/*/times"),
        ("input", ".work/*/plan.json"),
    ):  # fmt: skip
        if any(output.glob(pattern)):
            return stage
    return "begin"


def attempt(
    raw: Path, output: Path, split: Split, notes: Path, before_call: Callable[[], object]
) -> bool:
    """Run in a fork, which may go on with what is there; whether it was killed."""

    def work(begin: Callable[[], None]) -> None:
        logging.getLogger("nvt_torchrec.etl.split_pass").addHandler(logging.FileHandler(notes))
        logging.getLogger("nvt_torchrec.etl.split_pass").setLevel(logging.DEBUG)
        begin()
        nvt_torchrec.etl.run.run(settings(raw, output, spec_of(split), workers=WORKERS))

    return was_killed(work, before_call)


def one_split(raw: Path, directory: Path, split: Split, stride: int) -> dict:
    """Kill runs at the moments of one; what was seen."""
    directory.mkdir()
    output, notes, file = directory / "out", directory / "notes", directory / "moments"

    def note() -> None:
        with open(file, "a") as opened:
            opened.write(stage_of(output) + "\n")

    assert not attempt(raw, output, split, notes, note)
    whole, blocks = tree(output), notes.read_text().count("begin times")
    seen: dict = {"kills": collections.Counter(), "wrong": [], "blocks": blocks}
    for moment, stage in enumerate(file.read_text().split()):
        if moment % {"times": 2, "cut": 1}.get(stage, stride):
            continue
        shutil.rmtree(output)
        notes.unlink(missing_ok=True)
        if not attempt(raw, output, split, notes, kill_before(1 + moment)):
            continue  # threads did fewer things this time
        seen["kills"][stage_of(output)] += 1
        attempt(raw, output, split, notes, lambda: None)
        found = tree(output)
        seen["wrong"] += [
            f"{moment}, {stage}: {name}"
            for name in sorted(whole.keys() | found.keys())
            if whole.get(name) != found.get(name)
        ]
        counted = notes.read_text().count("begin times")
        if not blocks <= counted <= blocks + WORKERS:
            seen["wrong"].append(f"{moment}, {stage}: {counted} of {blocks} blocks were counted")
    return seen


def main(directory: Path, stride: int) -> None:
    """Print, as JSON, for each split: kills by stage, blocks, and what was not as it should be."""
    raw = directory / "raw"
    write_log(raw)

    def small_blocks(*arguments, **options):
        return make_plan(*arguments, **{**options, "block_bytes": BLOCK_BYTES})

    nvt_torchrec.etl.stages.make_plan = small_blocks
    for split in SPLITS:  # imports and compiles, here, before any fork
        nvt_torchrec.etl.run.run(settings(raw, directory / f"warm_{split.by}", spec_of(split)))
    seen = {split.by: one_split(raw, directory / split.by, split, stride) for split in SPLITS}
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
