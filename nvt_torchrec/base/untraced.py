"""Make objects of TorchRec without asking torch.fx.

The metaclass of TorchRec's classes calls a function of torch.fx to ask whether it is tracing. In
each process PyTorch warns about this function once, which users can do nothing about.
"""

from __future__ import annotations

from typing import Any, TypeVar

_Made = TypeVar("_Made")


def make_untraced(kind: type[_Made], *args: Any, **kwargs: Any) -> _Made:
    """Return ``kind(*args, **kwargs)``, made without the metaclass of torch.fx."""
    return type.__call__(kind, *args, **kwargs)
