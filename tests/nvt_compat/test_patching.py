"""The patches are loud where something is not as expected, and reach Dask's workers."""

from __future__ import annotations

import subprocess
import sys
import types

from nvt_torchrec.nvt_compat.patching import PatchError, edit, replace, supply

import pytest


def _sample(x):
    return x + 1


def _twice(x):
    return x + 10


def test_edit_changes_a_function_in_place() -> None:
    edit(_sample, ("x + 1", "x + 2"))
    assert globals()["_sample"](1) == 3


def test_edit_refuses_a_second_edit() -> None:
    """The file of the function shows the first source: an edit of it would undo the edit before."""
    edit(_twice, ("x + 10", "x + 20"))
    with pytest.raises(PatchError, match="_twice is edited twice"):
        edit(globals()["_twice"], ("x + 10", "x + 30"))
    assert globals()["_twice"](1) == 21


def test_edit_refuses_another_source() -> None:
    with pytest.raises(PatchError, match="not as expected: it contains 'zz"):
        edit(test_edit_refuses_another_source, ("z" * 9, ""))


def test_replace_refuses_another_source() -> None:
    module = types.SimpleNamespace(__name__="module", function=test_edit_refuses_another_source)
    with pytest.raises(PatchError, match="test_edit_refuses_another_source is not as expected"):
        replace(module, "function", lambda: 0, expect="zzz" + "zzz")
    with pytest.raises(PatchError, match=r"module.none does not exist"):
        replace(module, "none", lambda: 0, expect="")


def test_supply_leaves_what_is_there() -> None:
    module = types.ModuleType("module")
    module.a = 1
    supply(module, a=2, b=3)
    assert (module.a, module.b) == (1, 3)


def test_stock_nvtabular_needs_it() -> None:
    """Without nvt_compat the import fails: the day it does not, parts of it can go."""
    code = "import nvtabular"
    stock = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert stock.returncode != 0
    assert "ImportError" in stock.stderr or "AttributeError" in stock.stderr
    code = "import sys, nvt_torchrec.nvt_compat, nvtabular; print(nvtabular.__version__)"
    mended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert mended.returncode == 0, mended.stderr
    assert mended.stdout.startswith("23.0")
    assert mended.stderr == ""


def test_workers_are_patched(dask_client) -> None:
    def patched() -> bool:
        import sys

        return "nvt_torchrec.nvt_compat" in sys.modules

    assert all(dask_client.run(patched).values())
