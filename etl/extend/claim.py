"""Which extension may write to an output, and where it keeps the state of the day it adds.

An extension locks a marker in ``OUT`` while it runs; the lock ends with the process, even by
SIGKILL. The marker names the directory below ``OUT/.work`` of the day that is being added; each
day, and each ``--restart``, has a directory of another name, so that a worker that is still at an
earlier one does no harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.base.files.atomic import locked, remove_temporary
from nvt_torchrec.base.files.journal import Journal
from nvt_torchrec.etl.extend.switch import roll_forward
from nvt_torchrec.etl.output import (
    EXTENDING_FILE,
    NAME_LETTERS,
    UNFINISHED_FILE,
    WORK_DIRECTORY,
    anything_done,
    is_finished,
    named_errors,
    release,
    state_named,
)
from nvt_torchrec.formats.etl_output import SWITCH_FILE, EtlOutput
from nvt_torchrec.formats.manifest import Manifest

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Claim:
    """An output that this process extends.

    Attributes:
        output: the output directory.
        marker: the locked marker.
        resumed: whether an interrupted extension is continued.
    """

    output: Path
    marker: IO[str]
    resumed: bool = False

    @property
    def work(self) -> Path | None:
        """The state of the day that is being added; None between days."""
        name = state_named(self.marker)
        return self.output / WORK_DIRECTORY / name if name else None

    def unfinished_day(self) -> dict[str, Any] | None:
        """The plan of the day that is being added; None if nothing of it was written down."""
        work = self.work
        remedy = "discard what was done and begin again with --restart"
        return Journal(work).plan(dict[str, Any], remedy) if work else None

    def begin(self) -> Path:
        """Return the directory of the state of the day that is being, or will be, added."""
        if (work := self.work) is None:
            self._write(secrets.token_hex(NAME_LETTERS // 2))
            work = self.work
        return work

    def end(self) -> None:
        """Forget the day that was being added; errors do not matter."""
        self._write("")
        shutil.rmtree(self.output / WORK_DIRECTORY, ignore_errors=True)

    def _write(self, name: str) -> None:
        self.marker.seek(0)
        self.marker.truncate()
        self.marker.write(name)
        self.marker.flush()


@contextlib.contextmanager
def claimed(output: Path, *, resume: bool, restart: bool) -> Iterator[Claim]:
    """Claim a finished output for an extension.

    A switch that has begun is finished first. If the caller fails before any work was done for a
    day, all that it wrote for this day is removed.

    Args:
        output: the OUT of a finished run.
        resume: continue what an interrupted extension did.
        restart: discard the day that an interrupted extension was adding.

    Raises:
        BadInputError: there is no finished run, or the switch to a generation was interrupted.
        OutputError: an interrupted extension is neither resumed nor discarded, another process
            writes to the directory, or it cannot be written.
    """
    _check_finished(output)
    with contextlib.ExitStack() as stack:
        with named_errors(output):
            marker = stack.enter_context(locked(output / EXTENDING_FILE, output))
        claim = Claim(output, marker, resume)
        if not resume:
            EtlOutput(output).check_whole()
        generation = roll_forward(output)
        if generation is not None:
            log.info("%s: finished the switch to generation %d", output, generation)
        _settle(claim, resume=resume, restart=restart)
        try:
            yield claim
        except BaseException as error:
            work = claim.work
            switching = (output / SWITCH_FILE).exists()
            if not switching and (work is None or not anything_done(work, error)):
                _leave(claim)
            raise
        _leave(claim)


def _leave(claim: Claim) -> None:
    claim.end()
    with contextlib.suppress(OSError):
        (claim.output / EXTENDING_FILE).unlink()


def _check_finished(output: Path) -> None:
    """Refuse what is no finished output, and tidy up after a run that was killed at its end."""
    if (output / UNFINISHED_FILE).exists():
        with locked(output / UNFINISHED_FILE, output):
            if not is_finished(output):
                raise OutputError(
                    f"{output}: holds a run that did not finish",
                    "finish it with `python -m etl run … --resume`, then extend it",
                )
            release(output)
    if not is_finished(output):
        raise BadInputError(
            f"{output}: no finished run ({EtlOutput(output).manifest.name} is missing)",
            "make one with `python -m etl run`; --output_path is its OUT",
        )


def _settle(claim: Claim, *, resume: bool, restart: bool) -> None:
    """Decide about the day that an earlier process was adding."""
    plan = claim.unfinished_day() if not restart else None
    if plan is None or _is_added(claim.output, plan):
        claim.end()
        return
    if not resume:
        day = plan["settings"]["day"]
        raise OutputError(
            f"{claim.output}: adding day {day} was interrupted; the output is as it was before",
            f"finish it with --resume and --input_path {next(iter(plan['inputs']))}, or discard "
            "what was done with --restart",
        )
    remove_temporary(claim.output)


def _is_added(output: Path, plan: dict[str, Any]) -> bool:
    """Whether the switch to the day of a plan was finished, and only its state was left."""
    return plan["settings"]["generation"] <= (
        Manifest.read(EtlOutput(output).manifest).generation or 0
    )
