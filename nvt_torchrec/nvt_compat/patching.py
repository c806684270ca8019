"""Patch names and functions of other packages, and fail if their source is not as expected."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


class PatchError(ImportError):
    """The source of a function of a pinned package is not the one that a patch was written for."""


def supply(module: ModuleType, **names: Any) -> None:
    """Set names that a module does not have; do not change existing names."""
    for name, value in names.items():
        if not hasattr(module, name):
            setattr(module, name, value)


def replace(module: ModuleType | type, name: str, value: Any, *, expect: str) -> None:
    """Replace ``module.name``, whose source must contain ``expect``.

    Raises:
        PatchError: The name does not exist, or its source does not contain ``expect``.
    """
    old = getattr(module, name, None)
    if old is None:
        raise PatchError(f"nvt_compat: {module.__name__}.{name} does not exist")
    if getattr(old, "__nvt_compat__", False):
        return
    check_source(old, expect)
    value.__nvt_compat__ = True
    setattr(module, name, value)


def check_source(function: Callable, expect: str) -> None:
    """Raise :class:`PatchError` if the source of a function does not contain ``expect``."""
    if expect not in inspect.getsource(function):
        name = f"{function.__module__}.{function.__qualname__}"
        raise PatchError(f"nvt_compat: {name} is not as expected: it does not contain {expect!r}")


def edit(function: Callable, *edits: tuple[str, str]) -> None:
    """Recompile a module-level function after replacing expressions in its source.

    Args:
        function: The function; its decorators are applied again.
        edits: Pairs (expression, replacement). Each expression must occur exactly once.

    Raises:
        PatchError: An expression does not occur exactly once, or the function was already edited.
            (The source is read from the file, so the earlier edits would be lost.)
    """
    if getattr(function, "__nvt_compat__", False):
        raise PatchError(f"nvt_compat: {function.__qualname__} is edited twice")
    function = inspect.unwrap(function)
    source = inspect.getsource(function)
    for old, new in edits:
        if source.count(old) != 1:
            raise PatchError(
                f"nvt_compat: {function.__module__}.{function.__qualname__} is not as expected: "
                f"it contains {old!r} {source.count(old)} times, not once"
            )
        source = source.replace(old, new)
    # Prepend empty lines, so that line numbers in tracebacks match the file.
    source = "\n" * (function.__code__.co_firstlineno - 1) + source
    exec(compile(source, inspect.getfile(function), "exec"), function.__globals__)
    function.__globals__[function.__name__].__nvt_compat__ = True
