"""Compiled loops: kept, and made again when anything in them changes."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
from numba import carray
from numba.core.dispatcher import Dispatcher

from nvt_torchrec.base import kernels

FILES = {
    "loops.py": """
from nvt_torchrec.base.kernels import compiled
from inner import STEP, add, by_hand

@compiled()
def run(x):
    return below(add(x) + STEP + by_hand(x))

@compiled("int64(int64)")
def below(x):
    return x + 1000
""",
    "inner.py": """
import numba
from numba import types
from numba.extending import intrinsic
from numbers_ import DEEP, STEP

@numba.njit(inline="always")
def add(x):
    return x + DEEP

@intrinsic
def by_hand(_context, x):
    def generate(context, builder, _signature, values):
        return context.get_constant(types.int64, 7)
    return types.int64(x), generate
""",
    "numbers_.py": "DEEP = 10\nSTEP = 100\nOTHER = 5\n",
}


def started(folder, code, **environment):
    """A process of its own."""
    environment = os.environ | environment
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def run(folder):
    """(what the loop answers, how many times it was compiled)."""
    code = "import loops; print(loops.run(1), sum(loops.run.stats.cache_misses.values()))"
    return tuple(map(int, started(folder, code).stdout.split()))


def test_kept_until_it_changes_or_is_damaged(tmp_path):
    """A power failure leaves files that are cut short."""
    folder = tmp_path
    for name, text in FILES.items():
        (folder / name).write_text(text)
    assert run(folder) == (1118, 1)
    with open(folder / "numbers_.py", "a") as file:
        file.write("FURTHER = 1\n")  # nothing that the loop takes
    assert run(folder) == (1118, 0)
    for ending, size in (("nbc", 0), ("nbc", 100), ("nbi", 0), ("nbi", 20)):
        (path,) = folder.glob(f"__pycache__/loops.run*.{ending}")
        os.truncate(path, size)
        assert run(folder) == (1118, 1), (ending, size)
    assert run(folder) == (1118, 0)
    for name, old, new, answer in (
        ("loops.py", "x + 1000", "x + 2000", 2118),
        ("inner.py", "types.int64, 7", "types.int64, 8", 2119),
        ("numbers_.py", "STEP = 100", "STEP = 200", 2219),
    ):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
        assert run(folder) == (answer, 1)
    assert run(folder) == (2219, 0)
    # it works where nothing can be written, and says why it is slow each time
    (folder / "__pycache__").rename(folder / "away")
    (folder / "__pycache__").write_text("as if it could not be written")
    nowhere = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "NUMBA_CACHE_DIR": ""}
    done = started(folder, "import loops; print(loops.run(1))", **nowhere)
    assert done.stdout == "2219\n"
    assert done.stderr.count("cannot be cached") == 1
    assert "NUMBA_CACHE_DIR" in done.stderr


ROOMS = ("base", "clicklog", "workflows/compiled", "etl", "nvt_loader")


def test_what_our_loops_take_counts():
    """Nothing reaches a loop by a way that its stamp does not see: a closure, a module's number."""
    loops = []
    root = Path(kernels.__file__).parents[1]
    for room in ROOMS:
        for path in sorted(root.joinpath(room).rglob("*.py")):
            if "kernels import compiled" in path.read_text():
                name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
                module = importlib.import_module(name)
                loops += [item for item in vars(module).values() if isinstance(item, Dispatcher)]
    assert len(loops) > 50
    for loop in loops:
        function = loop.py_func
        assert function.__closure__ is None, function
        for name, value in kernels.list_named_globals(function):
            seen = isinstance(value, (Dispatcher, *kernels._CONSTANTS)) or hasattr(value, "_defn")
            assert seen or value in (np, numba, carray, math), (function, name, value)
