"""Make ``nvtabular.Workflow.load`` open workflows that ``python -m etl run`` saved.

The released function looks for a pickle, which they do not contain, and raises FileNotFoundError.
"""

from __future__ import annotations

import functools
import json

from nvt_torchrec.nvt_compat.patching import replace

import fsspec
from fsspec.implementations.local import LocalFileSystem

from nvt_torchrec.base.errors import BadInputError


def _format(fs, directory: str) -> str | None:
    """Return the format in metadata.json, which NVTabular's own workflows do not have."""
    try:
        with fs.open(f"{directory}/metadata.json") as file:
            return json.load(file).get("format")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # the loader reports what is wrong


def _loading_ours(load):
    @functools.wraps(load)
    def load_workflow(cls, path, client=None):
        # Imported by the call, because `workflows` imports this package.
        from nvt_torchrec.formats.workflow_description import FORMAT
        from nvt_torchrec.workflows.store import load as load_ours

        fs, _, [directory] = fsspec.get_fs_token_paths(str(path))
        if _format(fs, directory) != FORMAT.name:
            return load(cls, path, client=client)
        if not isinstance(fs, LocalFileSystem):
            raise BadInputError(f"{path}: not a local directory", "copy the workflow here first")
        workflow = load_ours(directory)
        workflow.client = client
        return workflow

    return load_workflow


def apply() -> None:
    """Replace ``Workflow.load``."""
    from nvtabular import Workflow

    load = classmethod(_loading_ours(Workflow.load.__func__))
    replace(Workflow, "load", load, expect='"workflow.pkl"')
