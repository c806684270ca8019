"""Numba without SciPy: not loaded by our kernels, there for those that need it."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import sys
import numba
import numpy as np
from clicklog.fast_rows import count_newlines

assert count_newlines(np.frombuffer(b"a\\nb\\n", np.uint8)) == 2
assert "scipy.linalg" not in sys.modules

@numba.njit
def product(a, b):
    return np.dot(a, b), np.linalg.det(a)

found = product(np.array([[2.0, 1.0], [0.0, 3.0]]), np.eye(2))
assert found[0].tolist() == [[2, 1], [0, 3]] and abs(found[1] - 6) < 1e-12
assert "scipy.linalg.cython_blas" in sys.modules
import scipy.linalg
"""


def test_scipy_is_loaded_by_those_who_need_it() -> None:
    subprocess.run([sys.executable, "-c", _CODE], check=True, timeout=120)
