"""Numba, loaded without SciPy; import this before the first kernel.

With its first kernel Numba imports SciPy's linear algebra, to know whether there is a BLAS for the
inner products of ``np.cov`` and its like: a fifth of a second at every start. No kernel here has
one. Told that there is none, Numba takes a loop for those; ``np.dot`` and ``np.linalg`` in other
people's kernels look for SciPy when they are compiled, and find it.
"""

from __future__ import annotations

import sys

_BLAS = "scipy.linalg.cython_blas"

if _BLAS not in sys.modules:
    sys.modules[_BLAS] = None  # type: ignore[assignment]  # so that importing it fails
    try:
        import numba.np.arraymath  # noqa: F401
    finally:
        del sys.modules[_BLAS]
