"""From a feature spec to an NVTabular Workflow, and to disk and back.

:func:`build` and :func:`load` return genuine ``nvtabular.Workflow`` objects. Importing this package
imports neither NVTabular nor Dask nor pandas; calling ``build``, ``load`` or ``save`` does.
"""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"]:  # `python -m workflows`: Ctrl-C gives one line during these imports too
    import nvt_torchrec.base.interrupts  # noqa: F401

# isort: split
from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec import __version__
from nvt_torchrec.formats.generations import Generation
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.frames import to_frame
from nvt_torchrec.workflows.vocabulary import FittedVocabulary, finish
from nvt_torchrec.workflows.writer import Fitted, write_workflow

if TYPE_CHECKING:
    from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
    from nvt_torchrec.workflows.store import Workflow

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


def build(spec: FeatureSpec, categories_path: Path | str = "./") -> Workflow:
    """Return an unfitted Workflow for a feature spec; see :func:`workflows.store.build`."""
    from nvt_torchrec.workflows import store

    return store.build(spec, categories_path)


def load(path: Path | str, *, label: bool = True, raw: bool = True) -> Workflow:
    """Return the fitted Workflow in a directory; see :func:`workflows.store.load`.

    Args:
        path: Directory that :func:`save` or ``python -m etl run`` wrote.
        label: Whether the Workflow passes the label through (training) or has no such column
            (inference).
        raw: Whether it takes columns of the raw log, as text or as typed values, or frames of
            :func:`to_frame`.
    """
    from nvt_torchrec.workflows import store

    return store.load(path, label=label, raw=raw)


def save(workflow: Workflow, spec: FeatureSpec, path: Path | str) -> WorkflowDescription:
    """Write a fitted Workflow of :func:`build` to a directory; see :func:`workflows.store.save`."""
    from nvt_torchrec.workflows import store

    return store.save(workflow, spec, path)
