"""From a feature spec to an NVTabular Workflow, and to disk and back.

:func:`build` and :func:`load` return genuine ``nvtabular.Workflow`` objects. Importing this package
imports neither NVTabular nor Dask nor pandas; ``build``, ``load`` and ``save`` do.
"""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"]:  # `python -m workflows`: Ctrl-C gives one line during these imports too
    import nvt_torchrec.base.interrupts  # noqa: F401

# isort: split
from typing import TYPE_CHECKING, Any

from nvt_torchrec import __version__
from nvt_torchrec.formats.generations import Generation
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.frames import to_frame
from nvt_torchrec.workflows.vocabulary import FittedVocabulary, finish
from nvt_torchrec.workflows.writer import Fitted, write_workflow

if TYPE_CHECKING:
    from nvt_torchrec.workflows.store import build, load, save

__all__ = [
    "Fitted",
    "FittedVocabulary",
    "Generation",
    "WorkflowDescription",
    "__version__",
    "build",
    "finish",
    "inspect",
    "load",
    "save",
    "to_frame",
    "write_workflow",
]


def __getattr__(name: str) -> Any:
    if name in ("build", "load", "save"):
        from nvt_torchrec.workflows import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
