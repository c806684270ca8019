"""The plan of a run, recorded when it begins: a resumed one must have the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nvt_torchrec.base.files.journal import Journal, refuse_changes
from nvt_torchrec.base.versions import find_installed_version
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.lines import read_bytes
from nvt_torchrec.etl.state.output import RESTART
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest

log = logging.getLogger(__name__)

#: Packages of other versions may write other bytes.
_VERSIONED_PACKAGES = ("nvt-torchrec", "pyarrow", "numpy", "numba", "nvtabular", "pandas")
#: Bytes of a sample of a file.
_SAMPLE_BYTES = 1 << 20
#: How many samples of a file its digest is of.
_NUM_SAMPLES = 16


def fingerprint(day: DayFile) -> dict[str, Any]:
    """Return what identifies the content of a file: its size and time of change.

    Where a file system knows no time, it is a checksum of the first and last bytes.

    Raises:
        BadInputError: It cannot be read.
    """
    if day.modified is not None:
        return {"size": day.size, "modified": str(day.modified)}
    # A set: both are the same range of a small file.
    ends = {(0, min(day.size, _SAMPLE_BYTES)), (max(0, day.size - _SAMPLE_BYTES), day.size)}
    return {"size": day.size, "sha256 of its ends": _digest(day, sorted(ends))}


def content_digest(day: DayFile) -> str:
    """Return a digest by which copies of a file are known: of its size, and of 16 MiB in 16 places.

    All of a small file is read. To read all of a large one would take as long as a tenth of a run.

    Raises:
        BadInputError: It cannot be read.
    """
    step = max(_SAMPLE_BYTES, -(-day.size // _NUM_SAMPLES))
    ranges = []
    for begin in range(0, day.size, step):
        ranges.append((begin, min(begin + _SAMPLE_BYTES, day.size)))
    return f"{day.size}-{_digest(day, ranges)}"


def _digest(day: DayFile, ranges: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for begin, end in ranges:
        digest.update(read_bytes(day.path, begin, end))
    return digest.hexdigest()


def plan_record(settings: dict[str, Any], days: list[DayFile]) -> dict[str, Any]:
    """Return what a run depends on, in JSON: settings, inputs, versions of packages."""
    versions = {name: find_installed_version(name) for name in _VERSIONED_PACKAGES}
    inputs = {day.path: fingerprint(day) for day in days}
    record = {"settings": settings, "inputs": inputs, "versions": versions}
    return json.loads(json.dumps(record))  # with lists in place of tuples, as when it is read


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """The plan of a job in JSON, see :func:`plan_record`."""

    settings: dict[str, Any]
    inputs: dict[str, dict[str, Any]]
    versions: dict[str, Any]


def begin_or_resume(work: Path, now: dict[str, Any], output: Path) -> bool:
    """Begin a job, or resume it, whose plan must then be that of its beginning.

    Args:
        work: The directory of the job's state.
        now: The plan of the job, see :func:`plan_record`.
        output: What it writes, for errors.

    Returns:
        Whether it is resumed.

    Raises:
        BadInputError: The plan of the beginning is damaged.
        OutputError: The plan is another one, or cannot be written.
    """
    journal = Journal(work)
    begun = journal.read_plan(PlanRecord, RESTART)
    if begun is None:
        journal.begin(now)
        return False
    before = adapt_plan(begun, now)
    refuse_changes(before, now, output, f"undo that, or {RESTART}")
    log.info("%s: resuming a run that did not finish", output)
    journal.update(now)
    return True


def adapt_plan(begun: PlanRecord, now: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of the beginning, as that of a resumed job has to be."""
    before = dataclasses.asdict(begun)
    if now["settings"].get("on_bad_rows") == "quarantine":
        # No finished unit had bad rows, or the job would have ended: with quarantine, the units
        # would be the same.
        before["settings"]["on_bad_rows"] = "quarantine"
    return before


def read_finished(output: Path, now: dict[str, Any]) -> Manifest:
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
    inputs = manifest.drop_extensions(manifest.fingerprints())
    settings = {name: manifest.settings.get(name) for name in now["settings"]}
    before = {"settings": settings, "inputs": inputs}
    now = {"settings": now["settings"], "inputs": manifest.drop_extensions(now["inputs"])}
    remedy = "choose another --output_path, or add new days with `python -m etl extend`"
    refuse_changes(before, now, output, remedy)
    log.info("%s: finished already, nothing to do", output)
    return manifest
