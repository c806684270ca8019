"""The record of the workflow that a run fitted, or that an extension made."""

from __future__ import annotations

from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, ClickLogError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.etl.output import FITTED_FILE
from nvt_torchrec.formats.etl_output import EtlOutput


def record_workflow(work: Path, digest: str) -> None:
    """Record that the workflow of this digest is whole. Raises :class:`OutputError`."""
    write_json(work / FITTED_FILE, {"digest": digest})


def recorded_digest(work: Path) -> str | None:
    """Return the digest of the workflow that is recorded; None if there is none."""
    file = work / FITTED_FILE
    try:
        return parse(dict[str, str], read_json(file, "the record of a fit"), file)["digest"]
    except (BadInputError, KeyError):
        return None


def is_whole(output: EtlOutput, work: Path) -> bool:
    """Return whether an output's workflow is the one recorded, and it and its state are whole."""
    from nvt_torchrec.workflows import compiled, inspect
    from nvt_torchrec.workflows.extension.state import read_state

    try:
        description = inspect(output.workflow)
        if recorded_digest(work) != description.digest:
            return False
        description.verify()
        compiled.load(output.workflow, verify=True)
        read_state(output.extension, description)
    except ClickLogError:
        return False
    return True
