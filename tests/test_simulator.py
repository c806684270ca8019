"""The tests of kernels, in a process of its own: the simulator takes the place of numba.cuda."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_kernels_in_the_simulator() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    for name in list(environment):
        if name.startswith("PYTEST_"):  # of the process that runs this test
            del environment[name]
    done = subprocess.run(
        [*command, "tests/simulator"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout
