"""Runs of the engine for GPUs that are killed with SIGKILL, and resumed.

``NUMBA_ENABLE_CUDASIM=1 python -m tests.simulator.killed DIRECTORY`` prints what it saw as JSON.
For moments see ``tests/forks.py``. The simulated card and Dask's workers are threads of the process
that is killed.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

from nvt_torchrec.etl.engines.device import gpu_workers as device
from nvt_torchrec.etl.engines.workers import Workers
from nvt_torchrec.etl.run import run
from tests.etl.killed import stage_of
from tests.etl.runs import settings, tree
from tests.forks import kill_before, was_killed
from tests.simulator.test_engine import SPEC, simulate, write

DAYS = 5
#: The stages in which runs are killed, and where in the stage.
MOMENTS = (("fit", 0.05), ("fit", 0.6), ("transform", 0.5))


def attempt(raw: Path, output: Path, counts: Path, before_call: Callable[[], object]) -> bool:
    """Run in a fork, which may go on with what is there; whether it was killed."""

    def work(begin: Callable[[], None]) -> None:
        options = {"processes": False, "dashboard_address": None, "threads_per_worker": 1}
        patches = pytest.MonkeyPatch()
        with LocalCluster(n_workers=2, **options) as workers, Client(workers) as client:
            simulate(client, patches)
            count = device.count_block

            def counted(card, block, *arguments, **options):
                with open(counts, "a") as file:
                    file.write(f"{block.path}\n")
                return count(card, block, *arguments, **options)

            patches.setattr(device, "count_block", counted)
            patches.setattr(Workers, "_agrees", lambda *_: True)  # which counts a block as well
            begin()
            run(settings(raw, output, SPEC, engine="dask"))

    return was_killed(work, before_call)


def main(directory: Path) -> None:
    """Print, as JSON: the stages of kills, how many blocks were counted, and what differs."""
    raw, output = directory / "raw", directory / "out"
    counts, file = directory / "counts", directory / "moments"
    write(raw, DAYS)
    run(settings(raw, directory / "warm", SPEC))  # compiles, here, before any fork

    def note() -> None:
        with open(file, "a") as opened:
            opened.write(stage_of(output) + "\n")

    assert not attempt(raw, output, counts, note)
    whole, stages = tree(output), file.read_text().split()
    seen: dict = {"killed": [], "counted": [], "blocks": len(counts.read_text().split())}
    seen["different"] = []
    for stage, part in MOMENTS:
        shutil.rmtree(output)
        counts.unlink(missing_ok=True)
        moment = stages.index(stage) + int(part * stages.count(stage))
        if attempt(raw, output, counts, kill_before(1 + moment)):
            seen["killed"].append(stage_of(output))
        attempt(raw, output, counts, lambda: None)
        seen["counted"].append(len(counts.read_text().split()))
        found = tree(output)
        names = sorted(whole.keys() | found.keys())
        seen["different"] += [name for name in names if whole.get(name) != found.get(name)]
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
