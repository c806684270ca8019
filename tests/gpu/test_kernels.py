"""Kernels compile for cards: the simulator runs them as Python, and takes what numba-cuda refuses.

This needs numba-cuda and NVIDIA's compiler, but no card: ``docs/gpu.md`` has the command.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.kernel_arguments import ARGUMENTS

MODULES = (
    "nvt_torchrec.clicklog.text.device.parse_kernels",
    "nvt_torchrec.workflows.compiled.device.lookup_kernels",
)
#: Kernels that count must do so atomically: several threads add to the same tally.
ATOMIC = {"encode_columns", "look_up_dense", "count_bits"}


@pytest.mark.skipif(
    find_spec("numba_cuda") is None or os.environ.get("NUMBA_ENABLE_CUDASIM") == "1",
    reason="needs numba-cuda: requirements/gpu.txt",
)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernels_compile_without_float64(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """NumPy's scalars turn int64 with uint64 into float64, and so may numba."""
    from numba import cuda, types
    from numba.cuda import dispatcher

    # functions that kernels call are compiled for the current card, which there may not be
    here = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: here)
    kernels = {}
    for name in MODULES:
        members = vars(importlib.import_module(name))
        kernels |= {
            key: value
            for key, value in members.items()
            if isinstance(value, dispatcher.CUDADispatcher)
        }
    assert kernels.keys() == ARGUMENTS.keys()
    for name, kernel in kernels.items():
        code, _ = cuda.compile_ptx(
            kernel.py_func, tuple(map(_numba_type(types), ARGUMENTS[name].split())), cc=capability
        )
        assert f".target sm_{capability[0]}{capability[1]}" in code
        assert ".f64" not in code, name
        assert ("atom." in code or "red." in code) == (name in ATOMIC), name


def _numba_type(types):
    def of(text: str):
        name, _, dimensions = text.partition("[")
        scalar = getattr(types, name)
        return types.Array(scalar, int(dimensions[:-1]), "C") if dimensions else scalar

    return of
