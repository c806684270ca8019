"""How loops are compiled, by Numba.

Numba is loaded without SciPy here. With its first kernel it imports SciPy's linear algebra, to know
whether there is a BLAS for the inner products of ``np.cov`` and its like: a fifth of a second at
every start. No kernel here has one. Told that there is none, Numba takes a loop for those;
``np.dot`` and ``np.linalg`` in other people's kernels look for SciPy when they are compiled, and
find it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

_BLAS = "scipy.linalg.cython_blas"

if _BLAS not in sys.modules:
    sys.modules[_BLAS] = None  # type: ignore[assignment]  # so that importing it fails
    try:
        import numba.np.arraymath
    finally:
        del sys.modules[_BLAS]

import numba  # noqa: E402
from numba.core import event  # noqa: E402
from numba.core.caching import FunctionCache  # noqa: E402

log = logging.getLogger(__name__)

_CONSTANTS = (bool, int, float, str, tuple, np.generic, np.ndarray)


def compiled(*signatures, nogil: bool = True):
    """Compile a function once per machine: what is compiled is kept beside the source.

    By itself Numba compiles again when the file of the function changes. What the function calls
    in other files is compiled into it as well, and so are the constants that it imports; here they
    count too. Where nothing can be kept it is compiled in every process, which is said.

    Args:
        signatures: Numba's types, to compile for at import, and for no others. Without any, the
            function is compiled when it is first called with others.
        nogil: let go of the interpreter's lock. To get it back takes microseconds; ``False`` is
            for what takes no longer.
    """

    def compile_all(function: Callable) -> Callable:
        dispatcher = numba.njit(nogil=nogil)(function)
        try:
            dispatcher._cache = _Cache(function)
        except RuntimeError:  # no directory can be written, not even one of the user's
            _warn("no directory is writable")
        for signature in signatures:
            dispatcher.compile(signature)
        if signatures:
            dispatcher.disable_compile()
        return dispatcher

    return compile_all


_timing = event.TimingListener()
event.register("numba:compile", _timing)


def compile_seconds() -> float:
    """How long this process has compiled so far; other people's kernels too."""
    return _timing.duration if _timing.done else 0.0


class _Cache(FunctionCache):
    def load_overload(self, sig, target_context):
        # Not before: what the function calls may be defined below it.
        self._cache_file._source_stamp = stamp(self._py_func)
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # a pickle cut off by a power failure raises anything
            log.warning("%s: damaged, compiling again: %r", self.cache_path, error)
            with contextlib.suppress(OSError):
                self._cache_file.flush()
            found = None
        if found is None:
            _announce()
        return found

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _warn(f"{self.cache_path}: {error}")


@functools.cache
def _announce() -> None:
    log.info("compiling for this processor, up to half a minute; it is kept for the next time")


@functools.cache
def _warn(why: str) -> None:
    log.warning("what is compiled cannot be kept, so every start compiles again: %s", why)
    log.warning("  -> set NUMBA_CACHE_DIR to a writable directory")


def stamp(function: FunctionType) -> str:
    """A digest of the files of a function and of all that it calls, and of their constants."""
    parts: set[str] = set()
    _collect(function, set(), parts)
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def _collect(function: FunctionType, seen: set[FunctionType], parts: set[str]) -> None:
    if function in seen:
        return
    seen.add(function)
    parts.add(_digest(function.__code__.co_filename))
    for name, value in named(function):
        # what is called: by a kernel, or to make a kernel's instructions
        called = getattr(value, "py_func", None) or getattr(value, "_defn", None)
        if called is not None:
            _collect(called, seen, parts)
        elif isinstance(value, np.ndarray):
            digest = hashlib.sha256(value.tobytes()).hexdigest()
            parts.add(f"{name} {value.dtype} {value.shape} {digest}")
        elif isinstance(value, _CONSTANTS):
            parts.add(f"{name} {value!r}")


def named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that a function names, also inside of functions and loops within it."""
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for name in sorted({name for code in codes for name in code.co_names}):
        if name in function.__globals__:
            yield name, function.__globals__[name]


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
