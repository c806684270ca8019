"""The tests of kernels, in a process of its own: the simulator takes the place of numba.cuda."""

from __future__ import annotations

import os

from tests.shell import python


def test_kernels_in_the_simulator() -> None:
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    for name in list(environment):
        if name.startswith("PYTEST_"):  # of the process that runs this test
            del environment[name]
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/simulator")
    done = python(*command, env=environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout
