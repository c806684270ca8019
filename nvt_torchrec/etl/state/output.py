"""Claim an output directory for a run, and name the files of the run's state.

A run that has not finished leaves a marker, which is locked while it runs; the lock ends with the
process, even by SIGKILL. The marker names the directory of the run's state, below ``.work``. Each
``--restart`` gives it a new name, so that a worker of the previous run, which may still be busy,
writes nothing into the state of the new run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.base.files.atomic import locked, output_errors, remove_temporary
from nvt_torchrec.base.files.journal import UNITS
from nvt_torchrec.formats.etl_output import NAMES, SWITCH_FILE, EtlOutput

log = logging.getLogger(__name__)

UNFINISHED_FILE = ".unfinished"
WORK_DIRECTORY = ".work"
#: The marker of an extension of a finished output, see :mod:`etl.extend.claim`.
EXTENDING_FILE = ".extending"
#: Number of letters in the name of the directory of a run's state.
NAME_LETTERS = 8
#: The remedy for a damaged state.
RESTART = "discard the finished work and begin again with --restart"
#: The entries that a run creates in its output directory.
OWN = (WORK_DIRECTORY, *NAMES)
# The following names are in the directory of a run's state, together with its journal.
#: Decompressed days.
COPIES = "decompressed"
#: Counts and moments.
FIT = "fit"
#: The counts of NVTabular's own operators.
CATEGORIES = "categories"
#: The digest of the fitted workflow.
FITTED_FILE = "fit.json"
#: The parts, until all of them are written.
PARTS = "parts"
#: Rejected rows by unit.
REJECTED = "rejected"
#: Dask's own files.
DASK = "dask"
#: The cuts of a split by time that follow from shares.
CUTS_FILE = "cuts.json"
#: The time from which rows are late, see :mod:`etl.events.late_rows`.
LATE_FILE = "late.json"
#: What happened before each row, see :mod:`etl.events`.
EVENTS = "events"
#: The tables that are joined to the log, see :mod:`etl.tables`.
TABLES = "tables"
#: The data for drawing negatives, see :mod:`etl.negatives`; also in the directory for extensions.
NEGATIVES = "negatives"
#: Labels that come from other files than the log, see :mod:`etl.labels`.
LABELS = "labels"
#: Files that save work in a resumed run. Decompressed days do so too, unless the input is wrong:
#: then the next run reads other files.
_DONE = (FITTED_FILE, f"{FIT}/*.npz", f"{UNITS}/*.json", CUTS_FILE)


def check_output(output: Path, *, restart: bool = False) -> None:
    """Check that a run may use an output directory: it is absent, empty, or written by a run.

    Args:
        output: The directory.
        restart: Whether to refuse a finished run as well.

    Raises:
        OutputError: The directory holds something else.
    """
    if not output.is_dir():
        return
    names = sorted(path.name for path in output.iterdir())
    # A thread that was still busy after Ctrl-C may have created this directory again.
    if names in ([], [WORK_DIRECTORY]):
        return
    content = ", ".join(names[:5])
    remedy = "choose an empty --output_path, or remove it first"
    if is_finished(output):
        if restart:
            raise OutputError(f"{output}: holds {content} (a finished run)", remedy)
    elif UNFINISHED_FILE not in names:
        raise OutputError(f"{output}: holds {content}", remedy)


@contextlib.contextmanager
def claim_output(output: Path, *, restart: bool) -> Iterator[Path]:
    """Claim an output directory for a run; yield the directory of the run's state.

    If the caller fails before it did any work that can be resumed, everything it wrote is removed.

    Args:
        output: See :func:`check_output`.
        restart: Whether to discard the work of an unfinished run, instead of continuing it.

    Raises:
        OutputError: The directory holds something else, another process writes to it, or it cannot
            be written.
    """
    with contextlib.ExitStack() as stack:
        with name_errors(output):
            work = _take(output, stack, restart)
        try:
            yield work
        except BaseException as error:
            if not is_finished(output):
                if anything_done(work, error):
                    _log_copies(output, work)
                else:
                    with contextlib.suppress(OSError):
                        _remove(output, (*OWN, UNFINISHED_FILE))
            raise


def _is_wrong_input(error: BaseException) -> bool:
    """Return True if the input's content is wrong, not if reading it failed (EIO, a timeout)."""
    reading_failed = isinstance(error.__cause__, OSError) and error.__cause__.errno is not None
    return isinstance(error, BadInputError) and not reading_failed


def anything_done(work: Path, error: BaseException) -> bool:
    """Return True if a run that ended with an error leaves work that can be resumed."""
    patterns = list(_DONE)
    if not _is_wrong_input(error):
        patterns.append(f"{COPIES}/*")
    kept = itertools.chain.from_iterable(work.glob(pattern) for pattern in patterns)
    return any(path.is_file() for path in kept)


def _log_copies(output: Path, work: Path) -> None:
    """Log the size of the decompressed days, if there are any."""
    size = sum(path.stat().st_size for path in (work / COPIES).glob("*"))
    if size:
        log.info(
            "%s keeps %.2f GB of decompressed days for the next try; --restart discards them",
            output,
            size / 1e9,
        )


def _take(output: Path, stack: contextlib.ExitStack, restart: bool) -> Path:
    """Lock an output directory until ``stack`` is closed; return the directory of the state."""
    if not is_finished(output):
        check_output(output)
        output.mkdir(parents=True, exist_ok=True)
    elif not (output / UNFINISHED_FILE).exists():
        check_output(output, restart=restart)
        return output / WORK_DIRECTORY
    marker = stack.enter_context(locked(output / UNFINISHED_FILE, output))
    if is_finished(output):  # another process finished it before we got the lock
        release(output)
        check_output(output, restart=restart)
        return output / WORK_DIRECTORY
    if restart:
        _remove(output, OWN)
    remove_temporary(output)
    if restart:
        name_state(marker, "")
    return begin_state(output, marker)


def find_state(output: Path, marker: IO[str]) -> Path | None:
    """Return the directory of the state that a marker names; None if it names none yet.

    Raises:
        OutputError: The marker's content is not the name of a state.
    """
    marker.seek(0)
    try:
        name = marker.read(NAME_LETTERS + 1)
    except UnicodeDecodeError:
        name = "?"
    if name and not re.fullmatch(f"[0-9a-f]{{{NAME_LETTERS}}}", name):
        raise OutputError(f"{marker.name}: {name!r} is not the name of a run's state", RESTART)
    return output / WORK_DIRECTORY / name if name else None


def begin_state(output: Path, marker: IO[str]) -> Path:
    """Return the directory of the state that a marker names; a new one if it names none.

    Raises:
        OutputError: The directory would be on another file system than the output.
    """
    directory = output / WORK_DIRECTORY
    if directory.is_symlink() or directory.is_mount():
        raise OutputError(
            f"{directory}: a link or a mount point, but finished files must be renamed into OUT",
            "remove it, so that unfinished work is on the file system of OUT",
        )
    work = find_state(output, marker)
    if work is not None:
        return work
    name = secrets.token_hex(NAME_LETTERS // 2)
    name_state(marker, name)
    return output / WORK_DIRECTORY / name


def name_state(marker: IO[str], name: str) -> None:
    """Write the name of a state's directory to a marker; "" for none."""
    marker.seek(0)
    marker.truncate()
    marker.write(name)
    marker.flush()


def is_finished(output: Path) -> bool:
    """Return True if a directory holds a finished run.

    During a switch of generations the manifest may be missing, but the record of the switch exists.
    """
    return EtlOutput(output).manifest.exists() or (output / SWITCH_FILE).exists()


def release(output: Path, marker: str = UNFINISHED_FILE) -> None:
    """Remove the state of a run or extension that has finished, and its marker; ignore errors."""
    shutil.rmtree(output / WORK_DIRECTORY, ignore_errors=True)
    with contextlib.suppress(OSError):
        (output / marker).unlink()


def name_errors(output: Path) -> AbstractContextManager[None]:
    """Turn an OSError into an :class:`OutputError`."""
    return output_errors(
        output, "free space or make it writable, then run it again; or choose another --output_path"
    )


def _remove(output: Path, names: tuple[str, ...]) -> None:
    """Remove entries of an output directory."""
    for name in names:
        path = output / name
        if path.is_dir():
            # Workers of a cluster may still be busy with a unit of the failed run, and write into
            # its state while it is deleted. That does no harm: the next state has another name.
            shutil.rmtree(path, ignore_errors=name == WORK_DIRECTORY)
        else:
            path.unlink(missing_ok=True)
