"""The output directory of a run: what may be used of it, and which run may write to it.

A run that has not finished leaves a marker, which is locked while it runs; the lock ends with the
process, even by SIGKILL. The marker names the directory of the run's state, below ``.work``. After
each ``--restart`` that is another name, so that a worker of the run before, which may still be
working, writes nothing into the state of the new run.
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
#: Letters of the name of the directory of a run's state.
NAME_LETTERS = 8
#: What to do about a damaged state.
RESTART = "discard what was done and begin again with --restart"
#: What a run creates in its output directory.
OWN = (WORK_DIRECTORY, *NAMES)
# What follows is below the directory of a run's state, beside its journal.
#: Decompressed days.
COPIES = "decompressed"
#: What was counted.
FIT = "fit"
#: What NVTabular has counted.
CATEGORIES = "categories"
#: The digest of the fitted workflow.
FITTED_FILE = "fit.json"
#: The parts, until all of them are written.
PARTS = "parts"
#: Rejected rows by unit.
REJECTED = "rejected"
#: Dask's own files.
DASK = "dask"
#: The times by which a log is split that follow from shares.
CUTS_FILE = "cuts.json"
#: The time from which rows are late, see :mod:`etl.events.late_rows`.
LATE_FILE = "late.json"
#: What happened before each row, see :mod:`etl.events`.
EVENTS = "events"
#: The tables that are joined to the log, see :mod:`etl.tables`.
TABLES = "tables"
#: What negatives are drawn by, see :mod:`etl.negatives`; also in the directory for extensions.
NEGATIVES = "negatives"
#: Which rows were clicked, where the labels are from other files, see :mod:`etl.labels`.
LABELS = "labels"
#: What a resumed run need not do again. Decompressed days are not worth their room once the input
#: has turned out to be wrong: it will be another one, or none.
_DONE = (FITTED_FILE, f"{FIT}/*.npz", f"{UNITS}/*.json", CUTS_FILE)


def check_output(output: Path, *, restart: bool = False) -> None:
    """Check that a run may use an output directory: it is absent, empty, or a run's.

    Args:
        output: The directory.
        restart: Whether it may hold no finished run.

    Raises:
        OutputError: It holds something else.
    """
    if not output.is_dir():
        return
    names = sorted(path.name for path in output.iterdir())
    # A thread that was at work after Ctrl-C may have made this directory again.
    if names in ([], [WORK_DIRECTORY]):
        return
    held = ", ".join(names[:5])
    remedy = "choose an empty --output_path, or remove it first"
    if is_finished(output):
        if restart:
            raise OutputError(f"{output}: holds {held} (a finished run)", remedy)
    elif UNFINISHED_FILE not in names:
        raise OutputError(f"{output}: holds {held}", remedy)


@contextlib.contextmanager
def claim_output(output: Path, *, restart: bool) -> Iterator[Path]:
    """Claim an output directory for a run; yields the directory of the run's state.

    If the caller fails before any work was done, everything it wrote is removed.

    Args:
        output: See :func:`check_output`.
        restart: Whether to discard what an unfinished run did, instead of keeping it.

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
    """Return whether an error is of the input's content, and not of reading it (EIO, a timeout)."""
    reading_failed = isinstance(error.__cause__, OSError) and error.__cause__.errno is not None
    return isinstance(error, BadInputError) and not reading_failed


def anything_done(work: Path, error: BaseException) -> bool:
    """Return whether a run that ended with an error leaves what it need not do again."""
    patterns = list(_DONE)
    if not _is_wrong_input(error):
        patterns.append(f"{COPIES}/*")
    kept = itertools.chain.from_iterable(work.glob(pattern) for pattern in patterns)
    return any(path.is_file() for path in kept)


def _log_copies(output: Path, work: Path) -> None:
    """Log how much room decompressed days take, where there are any."""
    size = sum(path.stat().st_size for path in (work / COPIES).glob("*"))
    if size:
        log.info(
            "%s keeps %.2f GB of decompressed days for the next try; --restart discards them",
            output,
            size / 1e9,
        )


def _take(output: Path, stack: contextlib.ExitStack, restart: bool) -> Path:
    """Lock an output directory as long as ``stack`` lives; return the directory of the state."""
    if not is_finished(output):
        check_output(output)
        output.mkdir(parents=True, exist_ok=True)
    elif not (output / UNFINISHED_FILE).exists():
        check_output(output, restart=restart)
        return output / WORK_DIRECTORY
    marker = stack.enter_context(locked(output / UNFINISHED_FILE, output))
    if is_finished(output):  # by another process, between the first look and the lock
        release(output)
        check_output(output, restart=restart)
        return output / WORK_DIRECTORY
    if restart:
        _remove(output, OWN)
    remove_temporary(output)  # there may be some of a worker that is not done yet, see _remove
    if restart:
        name_state(marker, "")
    return begin_state(output, marker)


def find_state(output: Path, marker: IO[str]) -> Path | None:
    """Return the directory of the state that a marker names; None if it names none yet.

    Raises:
        OutputError: It names something else.
    """
    marker.seek(0)
    try:
        name = marker.read(NAME_LETTERS + 1)
    except UnicodeDecodeError:
        name = "?"
    if name and not re.fullmatch(f"[0-9a-f]{{{NAME_LETTERS}}}", name):
        raise OutputError(f"{marker.name}: {name!r} is not a name that a run writes there", RESTART)
    return output / WORK_DIRECTORY / name if name else None


def begin_state(output: Path, marker: IO[str]) -> Path:
    """Return the directory of the state that a marker names; a new one if it names none.

    Raises:
        OutputError: It would be elsewhere than in the output directory.
    """
    directory = output / WORK_DIRECTORY
    if directory.is_symlink() or directory.is_mount():
        raise OutputError(
            f"{directory}: a link or a mount point; what is finished could not be renamed into OUT",
            "remove it: unfinished work takes room on the file system of OUT",
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
    """Return whether a directory holds a whole run; during a switch its manifest may be away."""
    return EtlOutput(output).manifest.exists() or (output / SWITCH_FILE).exists()


def release(output: Path, marker: str = UNFINISHED_FILE) -> None:
    """Remove the state of what has just finished, and its marker; errors do not matter any more."""
    shutil.rmtree(output / WORK_DIRECTORY, ignore_errors=True)
    with contextlib.suppress(OSError):
        (output / marker).unlink()


def name_errors(output: Path) -> AbstractContextManager[None]:
    """Turn an OSError into an :class:`OutputError`."""
    return output_errors(
        output, "free space or make it writable, then run it again; or choose another --output_path"
    )


def _remove(output: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = output / name
        if path.is_dir():
            # Workers of a cluster may still be at a unit of the run that failed. What they write
            # into its state meanwhile is harmless: the next run's state has another name.
            shutil.rmtree(path, ignore_errors=name == WORK_DIRECTORY)
        else:
            path.unlink(missing_ok=True)
