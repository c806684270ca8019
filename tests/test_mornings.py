"""Mornings of docs/daily.md that are killed at random moments, and repeated until they succeed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.etl.extended import differences
from tests.etl.runs import tree
from tests.shell import run, started
from tests.test_runbook import BEGIN, begin

pytestmark = pytest.mark.timeout(3600)

#: How many mornings, of at most five; more take minutes.
_MORNINGS = int(os.environ.get("MORNINGS", "1"))
_KILLS = 3  # of a morning; after them it is left alone


def _killed(directory: Path, script: str, seconds: float) -> bool:
    """Run a script; kill all its processes after some seconds. Return whether that was needed."""
    try:
        with started(directory, ["bash", "-c", script], directory / "printed.log") as process:
            status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return True
    assert status == 0, (directory / "printed.log").read_text()[-3000:]
    return False


def _results(job: Path, day: int) -> dict[str, bytes]:
    """Return the output of the ETL, and what is served but for the times in its record."""
    served = job / "SERVED" / "current"
    assert (served / "bundle.json").samefile(job / "bundles" / f"day_{day}" / "bundle.json")
    files = tree(job / "OUT")
    for directory in ("weights", "workflow"):
        files |= {f"{directory}/{name}": data for name, data in tree(served / directory).items()}
    files = {name: data.replace(b"/killed/", b"/job/") for name, data in files.items()}
    manifest = json.loads(files["manifest.json"])
    assert manifest.pop("blake2b")  # it covers the inputs' paths
    return files | {"manifest.json": json.dumps(manifest).encode()}


def test_killed_mornings_end_as_undisturbed_ones(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    job = begin(tmp_path / "job")
    killed = shutil.copytree(job, tmp_path / "killed", symlinks=True)
    chance = random.Random(2026)
    kills = 0
    for day in range(10, 10 + _MORNINGS):
        morning = f"{BEGIN}bash morning.sh {day - 1} {day}"
        status, printed = run(job, morning)
        assert status == 0, printed[-3000:]
        for turn in range(_KILLS + 1):
            seconds = chance.uniform(1, 20) if turn < _KILLS else 3000
            if not _killed(killed, morning, seconds):
                break
            kills += 1
        assert differences(_results(job, day), _results(killed, day)) == []
        status, printed = run(killed, morning)  # once more, although all is done
        assert status == 0, printed[-3000:]
        assert differences(_results(job, day), _results(killed, day)) == []
    assert kills
