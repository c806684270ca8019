"""The plan of a run, recorded when it begins; a resumed run must have the same plan."""

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

#: Packages whose version may change the bytes that are written.
_VERSIONED_PACKAGES = ("nvt-torchrec", "pyarrow", "numpy", "numba", "nvtabular", "pandas")
#: Bytes of one sample of a file.
_SAMPLE_BYTES = 1 << 20
#: Maximum number of samples in the digest of a file.
_NUM_SAMPLES = 16


def fingerprint(day: DayFile) -> dict[str, Any]:
    """Return what identifies the content of a file: its size and modification time.

    Without a modification time, a checksum of the first and last bytes takes its place.

    Raises:
        BadInputError: The file cannot be read.
    """
    if day.modified is not None:
        return {"size": day.size, "modified": str(day.modified)}
    # A set, because in a small file both ends are the same range.
    ends = {(0, min(day.size, _SAMPLE_BYTES)), (max(0, day.size - _SAMPLE_BYTES), day.size)}
    return {"size": day.size, "sha256 of its ends": _digest(day, sorted(ends))}


def content_digest(day: DayFile) -> str:
    """Return a digest that recognizes copies of a file: of its size and 16 samples of 1 MiB.

    Small files are read completely. For a large file that would take a tenth of the time of a run.

    Raises:
        BadInputError: The file cannot be read.
    """
    step = max(_SAMPLE_BYTES, -(-day.size // _NUM_SAMPLES))
    ranges = []
    for begin in range(0, day.size, step):
        ranges.append((begin, min(begin + _SAMPLE_BYTES, day.size)))
    return f"{day.size}-{_digest(day, ranges)}"


def _digest(day: DayFile, ranges: Iterable[tuple[int, int]]) -> str:
    """Return the SHA-256 digest of ranges of a file's bytes."""
    digest = hashlib.sha256()
    for begin, end in ranges:
        digest.update(read_bytes(day.path, begin, end))
    return digest.hexdigest()


def plan_record(settings: dict[str, Any], days: list[DayFile]) -> dict[str, Any]:
    """Return the plan of a run, JSON-ready: settings, inputs, versions of packages."""
    versions = {name: find_installed_version(name) for name in _VERSIONED_PACKAGES}
    inputs = {day.path: fingerprint(day) for day in days}
    record = {"settings": settings, "inputs": inputs, "versions": versions}
    return json.loads(json.dumps(record))  # tuples become lists, as in a plan that was read


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """A recorded plan, see :func:`plan_record`."""

    settings: dict[str, Any]
    inputs: dict[str, dict[str, Any]]
    versions: dict[str, Any]


def begin_or_resume(work: Path, now: dict[str, Any], output: Path) -> bool:
    """Begin a run or an extension, or resume it if its plan has not changed.

    Args:
        work: The directory of the state.
        now: The current plan, see :func:`plan_record`.
        output: The output directory, named in errors.

    Returns:
        Whether it is resumed.

    Raises:
        BadInputError: The recorded plan is damaged.
        OutputError: The plan has changed, or cannot be written.
    """
    journal = Journal(work)
    recorded = journal.read_plan(PlanRecord, RESTART)
    if recorded is None:
        journal.begin(now)
        return False
    before = adapt_plan(recorded, now)
    refuse_changes(before, now, output, f"undo that, or {RESTART}")
    log.info("%s: resuming a run that did not finish", output)
    journal.update(now)
    return True


def adapt_plan(recorded: PlanRecord, now: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded plan in the form that the current plan must equal to resume it."""
    before = dataclasses.asdict(recorded)
    if now["settings"].get("on_bad_rows") == "quarantine":
        # With "error", no finished unit had bad rows, or the run would have ended. So "quarantine"
        # gives the same units, and may replace "error" in a resumed run.
        before["settings"]["on_bad_rows"] = "quarantine"
    return before


def read_finished(output: Path, now: dict[str, Any]) -> Manifest:
    """Return the manifest of a finished run that is started again; its plan must be the same.

    Args:
        output: The output directory.
        now: The current plan, see :func:`plan_record`. Its versions are not compared: other
            versions of packages may read the output.

    Raises:
        BadInputError: The output is damaged, or an extension of it was interrupted.
        OutputError: The plan differs from that of the finished run.
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
