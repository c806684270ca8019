"""Compile loops with Numba, and cache the compiled code per machine."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from numba.core import event
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

log = logging.getLogger(__name__)

_MISSING = object()
_CONSTANTS = (bool, int, float, str, tuple, np.generic, np.ndarray)


def compiled(*signatures: Any, nogil: bool = True) -> Callable[[Callable], Any]:
    """Compile a function once per machine: the compiled code is cached next to the source.

    Numba's own cache is invalidated only when the file of the function changes. But functions that
    it calls in other files, and constants that it imports, are compiled into it, so here changes to
    them invalidate the cache, too. If no directory is writable, every process compiles, and a
    warning is logged.

    Args:
        signatures: Numba types to compile for at import; calls with other types fail. Without
            signatures, the function is compiled at its first call with each combination of types.
        nogil: Whether to release the interpreter lock. Reacquiring it takes microseconds; pass
            ``False`` for functions that take no longer than that.
    """

    def compile_all(function: Callable) -> Any:
        dispatcher = numba.njit(nogil=nogil)(function)
        try:
            dispatcher._cache = _Cache(function)
        except RuntimeError:  # no directory is writable, not even in the user's home
            _warn("no directory is writable")
        for signature in signatures:
            dispatcher.compile(signature)
        if signatures:
            dispatcher.disable_compile()
        return dispatcher

    return compile_all


@intrinsic
def pointer(_context: Any, address: Any) -> Any:
    """Return the memory at an address, for ``numba.carray``."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(numba.types.voidptr))

    return numba.types.voidptr(address), generate


_timing = event.TimingListener()
event.register("numba:compile", _timing)


def compile_seconds() -> float:
    """Return how long this process has spent compiling, kernels of other packages included."""
    return _timing.duration if _timing.done else 0.0


class _Cache(FunctionCache):
    """Numba's cache, with :func:`stamp` instead of the modification time of the function's file."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Not in __init__, because the function may call functions that are defined below it.
        self._cache_file._source_stamp = stamp(self._py_func)
        try:
            kept = super().load_overload(sig, target_context)
        except Exception as error:  # a truncated pickle can raise any error
            log.warning("%s: damaged, compiling again: %r", self.cache_path, error)
            with contextlib.suppress(OSError):
                self._cache_file.flush()
            kept = None
        if kept is None:
            _announce()
        return kept

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _warn(f"{self.cache_path}: {error}")


@functools.cache
def _announce() -> None:
    log.info("compiling for this processor, which takes up to half a minute; the result is cached")


@functools.cache
def _warn(why: str) -> None:
    log.warning("compiled code cannot be cached, so every process compiles again: %s", why)
    log.warning("  -> set NUMBA_CACHE_DIR to a writable directory")


def stamp(function: FunctionType) -> str:
    """Return a digest of the files and constants of a function and of all functions it calls."""
    parts: set[str] = set()
    _collect(function, set(), parts)
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def _collect(function: FunctionType, seen: set[FunctionType], parts: set[str]) -> None:
    """Collect the file digests and constants of a function and of all functions it calls.

    Args:
        function: The function.
        seen: The functions collected so far; changed in place.
        parts: The digests and constants collected so far; changed in place.
    """
    if function in seen:
        return
    seen.add(function)
    parts.add(_digest(function.__code__.co_filename))
    for name, value in list_named_globals(function):
        # a function called by a kernel, or one that generates a kernel's instructions
        called = getattr(value, "py_func", None) or getattr(value, "_defn", None)
        if called is not None:
            _collect(called, seen, parts)
        elif isinstance(value, np.ndarray):
            digest = hashlib.sha256(value.tobytes()).hexdigest()
            parts.add(f"{name} {value.dtype} {value.shape} {digest}")
        elif isinstance(value, _CONSTANTS):
            parts.add(f"{name} {value!r}")


def list_named_globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function uses, also in nested functions.

    For a global that is a module of the same package, yield the attributes that the function uses.
    """
    codes = [function.__code__]
    for code in codes:  # the list grows during the loop by the code of nested functions
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    names = sorted({name for code in codes for name in code.co_names})
    package = function.__module__.partition(".")[0]
    for name in names:
        value = function.__globals__.get(name, _MISSING)
        if isinstance(value, ModuleType) and value.__name__.startswith(f"{package}."):
            for inner in names:
                if inner in vars(value):
                    yield inner, vars(value)[inner]
        elif value is not _MISSING:
            yield name, value


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
