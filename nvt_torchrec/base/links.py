"""Import packages through the links at the top of a checkout as the same modules, not as copies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _LinkedModules(MetaPathFinder, Loader):
    """Imports ``NAME.module`` as ``nvt_torchrec.NAME.module``.

    ``__main__`` is excluded, because it is executed, not imported.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(f"{self._package}.") and not name.endswith(".__main__"):
            return ModuleSpec(name, self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(f"nvt_torchrec.{module.__name__}")


def follow_link(name: str) -> None:
    """Make a package that is imported through a link the package of nvt_torchrec.

    Args:
        name: The ``__name__`` of the package; nothing happens if it was not imported by a link.
    """
    if not name.startswith("nvt_torchrec."):
        sys.modules[name] = importlib.import_module(f"nvt_torchrec.{name}")
        sys.meta_path.insert(0, _LinkedModules(name))
