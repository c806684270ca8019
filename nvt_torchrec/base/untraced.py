"""Objects of TorchRec, made outside of torch.fx.

Their metaclass asks whether torch.fx is tracing, and PyTorch logs a warning about the function that
it asks by: once in each process, at the first object, whose maker can do nothing about it.
"""

from __future__ import annotations

from typing import Any, TypeVar

_Made = TypeVar("_Made")


def make_untraced(kind: type[_Made], *args: Any, **kwargs: Any) -> _Made:
    """Return ``kind(*args, **kwargs)``, as Python makes it without the metaclass of torch.fx."""
    return type.__call__(kind, *args, **kwargs)
