"""The plan of a run, recorded when it begins: a resumed one must have the same."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from nvt_torchrec.base.files.journal import Journal, refuse_changes
from nvt_torchrec.base.versions import installed_version
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.state.fingerprint import fingerprint
from nvt_torchrec.etl.state.output import RESTART
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest

log = logging.getLogger(__name__)

#: Packages of other versions may write other bytes.
_VERSIONS_OF = ("nvt-torchrec", "pyarrow", "numpy", "numba", "nvtabular", "pandas")


def plan_record(settings: dict[str, Any], days: list[DayFile]) -> dict[str, Any]:
    """What a run depends on, in JSON: settings, inputs, versions of what writes the output."""
    versions = {name: installed_version(name) for name in _VERSIONS_OF}
    inputs = {day.path: fingerprint(day) for day in days}
    value = {"settings": settings, "inputs": inputs, "versions": versions}
    return json.loads(json.dumps(value))  # tuples are lists in there


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """The plan of a job in JSON, see :func:`plan_record`."""

    settings: dict[str, Any]
    inputs: dict[str, dict[str, Any]]
    versions: dict[str, Any]


def begin_or_resume(work: Path, now: dict[str, Any], output: Path) -> bool:
    """Whether a job is resumed; its plan must be that of its beginning.

    Args:
        work: directory of the job's state.
        now: its plan, see :func:`plan_record`.
        output: what it writes, for errors.

    Raises:
        BadInputError: the plan of the beginning is damaged.
        OutputError: the plan is another one, or cannot be written.
    """
    journal = Journal(work)
    begun = journal.plan(PlanRecord, RESTART)
    if begun is None:
        journal.begin(now)
    else:
        before = before_resuming(begun, now)
        refuse_changes(before, now, output, f"undo that, or {RESTART}")
        log.info("%s: resuming a run that did not finish", output)
        journal.update(now)
    return begun is not None


def before_resuming(begun: PlanRecord, now: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of the beginning, as that of a resumed job has to be."""
    before = dataclasses.asdict(begun)
    if now["settings"].get("on_bad_rows") == "quarantine":
        # no finished unit had bad rows: quarantine would have done the same
        before["settings"]["on_bad_rows"] = "quarantine"
    return before


def already_finished(output: Path, now: dict[str, Any]) -> Manifest:
    """Return the manifest of a finished run that is asked for again; its plan must be the same.

    Args:
        output: What the run wrote.
        now: The plan, see :func:`plan_record`. Versions are not compared: others may read the
            output.

    Raises:
        BadInputError: The output is damaged, or an extension of it was interrupted.
        OutputError: The plan is another one.
    """
    paths = EtlOutput(output)
    paths.check_whole()
    manifest = Manifest.read(paths.manifest)
    inputs = manifest.without_extensions(manifest.fingerprints())
    before = {"settings": manifest.settings, "inputs": inputs}
    now = {"settings": now["settings"], "inputs": manifest.without_extensions(now["inputs"])}
    remedy = "choose another --output_path, or add new days with `python -m etl extend`"
    refuse_changes(before, now, output, remedy)
    log.info("%s: finished already, nothing to do", output)
    return manifest
