"""From a feature spec to an NVTabular Workflow, and to disk and back.

``build`` and ``load`` give genuine ``nvtabular.Workflow`` objects; importing this package imports
neither NVTabular nor Dask nor pandas (only using it does).
"""

from __future__ import annotations

import importlib

_HOME = {
    "build": "workflows.graph",
    "to_frame": "workflows.frames",
    "load": "workflows.store",
    "save": "workflows.store",
    "inspect": "workflows.description",
    "verify": "workflows.description",
    "WorkflowDescription": "workflows.description",
    "Fitted": "workflows.writer",
    "write_workflow": "workflows.writer",
    "FittedVocabulary": "workflows.vocabulary",
    "finish": "workflows.vocabulary",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
