"""The fitted workflow as arrays: hash tables and a few numbers per column.

``build`` writes them beside the saved workflow, ``load`` maps them into memory,
``CompiledWorkflow.transform`` does what ``nvtabular.Workflow.transform`` does. Nothing here imports
NVTabular, Dask, pandas or torch.
"""

from __future__ import annotations

import importlib

_HOME = {
    "CompiledWorkflow": "workflows.compiled.workflow",
    "EncodedRows": "workflows.compiled.workflow",
    "build": "workflows.compiled.builder",
    "load": "workflows.compiled.workflow",
    "to_table": "workflows.compiled.workflow",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
