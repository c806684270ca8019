"""The tests of kernels without a GPU, in processes of their own.

A simulator takes the place of numba.cuda, and an interpreter that of Triton's compiler. Triton,
190 MB to download and 690 MB installed, is not among the requirements of a CPU machine: where it is
missing its tests are skipped (``pip install --no-deps -c requirements/cuda.txt triton``).
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from tests.shell import python

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


def run_tests(folder: str, variable: str) -> None:
    environment = os.environ | {variable: "1"}
    for name in list(environment):
        if name.startswith("PYTEST_"):  # of the process that runs this test
            del environment[name]
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", folder)
    done = python(*command, env=environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout


def test_kernels_in_the_simulator() -> None:
    run_tests("tests/simulator", "NUMBA_ENABLE_CUDASIM")


@needs_triton
def test_triton_kernels_in_the_interpreter() -> None:
    run_tests("tests/triton_interpreter", "TRITON_INTERPRET")


@needs_triton
def test_triton_kernels_compile_for_a_gpu() -> None:
    done = python("-m", "tests.triton_interpreter.compile_kernels", env={**os.environ})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert len(done.stdout.splitlines()) == 8
