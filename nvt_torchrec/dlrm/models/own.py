"""A user's own model: the function that ``--model MODULE:FUNCTION`` names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from nvt_torchrec.base.errors import SettingsError

#: ``build`` of :mod:`.contract`.
Build: TypeAlias = Callable[..., nn.Module]


def load_build(name: str) -> Build | None:
    """Return the function ``MODULE:FUNCTION``; None for the name of a model of this project.

    It is found as Python finds modules, first in the current directory.

    Raises:
        SettingsError: It cannot be imported.
    """
    module, colon, function = name.partition(":")
    if not colon:
        return None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # of the user's module, too
        raise SettingsError(
            f"--model {name}: {type(error).__name__}: {error}",
            "name a function that Python can import from here: --model MODULE:FUNCTION",
        ) from error
