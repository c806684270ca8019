"""Which extension may write to an output, and how it is switched to another generation.

An extension locks a marker in ``OUT`` while it runs; the lock ends with the process, even by
SIGKILL. The marker names the directory below ``OUT/.work`` of the day that is being added; each
day, and each ``--restart``, has a directory of another name, so that a worker that is still at an
earlier one does no harm.

A switch is a few renames, written down before the first. The other generation is whole: with a day
that was added, it is in the state of the extension; the one before the newest is in
``OUT/.previous``. What a generation consists of is renamed by its names in ``OUT``, so no record
names a path. Until the record of the switch exists, ``OUT`` is the generation that it was. From
then on the switch only goes forward: whoever finds the record does the renames that are not done
yet. All that is renamed is durable before. While the record exists, nothing reads ``OUT``, see
:meth:`formats.etl_output.EtlOutput.check_whole`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.base.files.artifact import Format
from nvt_torchrec.base.files.atomic import fsync_directory, locked, remove, remove_temporary
from nvt_torchrec.base.files.journal import Journal
from nvt_torchrec.base.files.validation import resolve_inside
from nvt_torchrec.etl.state import output as state
from nvt_torchrec.etl.state.run_record import PlanRecord
from nvt_torchrec.formats.etl_output import NAMES, PREVIOUS, SWITCH_FILE, EtlOutput
from nvt_torchrec.formats.manifest import Manifest

_FORMAT = Format("nvt-torchrec switch", 2, "the record of a switch to another generation")
_REMEDY = "restore the output directory from a backup, or run the ETL again"
#: What a generation consists of; the first may be missing.
_PARTS = ("rejected", *(name for name in NAMES if name != "rejected"))
#: Below the state of the day that is being added: the next generation.
NEXT = "next"
#: Below that state: a generation that nobody needs.
DISCARDED = "discarded"


@dataclasses.dataclass(frozen=True)
class Switch:
    """A switch to another generation.

    Attributes:
        generation: The generation.
        state: The name of the directory of the extension's state.
        undo: Whether it is the generation before, and not that of a new day.
        names: What the generation consists of.
    """

    generation: int
    state: str
    undo: bool
    names: list[str]


def switch(output: Path, work: Path, generation: int, *, undo: bool = False) -> None:
    """Switch an output to a generation that is ready, and keep the one that it was.

    Args:
        output: The output directory.
        work: The state of the extension, in which the next generation is ready.
        generation: The generation.
        undo: Switch to the generation before instead; keep nothing.

    Raises:
        OutputError: The output cannot be written; ``--resume`` goes on from there.
    """
    ready = output / PREVIOUS if undo else work / NEXT
    with state.name_errors(output):
        for directory, _, _ in os.walk(ready):
            fsync_directory(Path(directory))
        if not undo and os.path.lexists(output / PREVIOUS):
            _rename(output / PREVIOUS, work / DISCARDED)
    names = [name for name in _PARTS if (ready / name).exists()]
    planned = Switch(generation, work.name, undo, names)
    _FORMAT.write(output / SWITCH_FILE, dataclasses.asdict(planned))
    roll_forward(output)


def roll_forward(output: Path) -> int | None:
    """Finish a switch that has begun; return the generation, or None if there is no such switch.

    Raises:
        BadInputError: The record of the switch, or something that it names, is missing or damaged.
        OutputError: The output cannot be written.
    """
    file = output / SWITCH_FILE
    if not file.exists():
        return None
    planned = _FORMAT.read(Switch, file, _REMEDY)
    work = resolve_inside(output, f"{state.WORK_DIRECTORY}/{planned.state}", file, _REMEDY)
    previous = resolve_inside(output, PREVIOUS, file, _REMEDY)
    if planned.undo:
        ready, retired = previous, work / DISCARDED
    else:
        ready, retired = work / NEXT, previous
    with state.name_errors(output):
        retired.mkdir(parents=True, exist_ok=True)
        # Each rename is done once: where the new one is not there, it was renamed before.
        for name in _PARTS:
            now, new = output / name, ready / name
            if now.exists() and (new.exists() or name not in planned.names):
                _rename(now, retired / name)
            if new.exists():
                _rename(new, now)
        for directory in (retired, output):
            fsync_directory(directory)
    paths = EtlOutput(output)
    manifest = Manifest.read(paths.manifest)
    if manifest.generation != planned.generation:
        raise BadInputError(f"{ready}: generation {planned.generation} is missing", _REMEDY)
    paths.check_described(manifest, _REMEDY, stores=False)  # they were not moved
    shutil.rmtree(ready, ignore_errors=True)
    remove(file)
    return planned.generation


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)


log = logging.getLogger(__name__)

#: The name of the state in which the newest day is taken back: a repeated command knows by it that
#: this is done.
_UNDOING = "0" * state.NAME_LETTERS


@dataclasses.dataclass(frozen=True)
class DayRecord(PlanRecord):
    """What adding a day depends on."""

    @property
    def day(self) -> int:
        """The day."""
        return self.settings["day"]

    @property
    def path(self) -> str:
        """The path of its file."""
        return next(iter(self.inputs))


@dataclasses.dataclass(frozen=True)
class Claim:
    """An output that this process extends.

    Attributes:
        output: The output directory.
        marker: The locked marker.
        undoing: Whether a process that was ended before was taking back the newest day.
    """

    output: Path
    marker: IO[str]
    undoing: bool

    def unfinished_day(self) -> DayRecord | None:
        """Read the plan of the day that is being added; None if nothing of it was written down."""
        work = state.find_state(self.output, self.marker)
        return Journal(work).read_plan(DayRecord, state.RESTART) if work else None

    def begin(self, *, undoing: bool = False) -> Path:
        """Return the directory of the state of the day that is being added, or taken back."""
        if undoing:
            state.name_state(self.marker, _UNDOING)
        return state.begin_state(self.output, self.marker)

    def end(self) -> None:
        """Forget the day that is being, or was being, added; errors do not matter."""
        state.name_state(self.marker, "")
        shutil.rmtree(self.output / state.WORK_DIRECTORY, ignore_errors=True)


@contextlib.contextmanager
def claim_extension(output: Path, *, restart: bool) -> Iterator[Claim]:
    """Claim a finished output for an extension.

    A switch that has begun is finished first. If the caller fails before any work was done for a
    day, all that it wrote for this day is removed.

    Args:
        output: The OUT of a finished run.
        restart: Discard the day that an interrupted extension was adding.

    Raises:
        BadInputError: There is no finished run.
        OutputError: Another process writes to the directory, or it cannot be written.
    """
    _check_finished(output)
    with contextlib.ExitStack() as stack:
        with state.name_errors(output):
            marker = stack.enter_context(locked(output / state.EXTENDING_FILE, output))
        undoing = state.find_state(output, marker) == output / state.WORK_DIRECTORY / _UNDOING
        claim = Claim(output, marker, undoing)
        generation = roll_forward(output)
        if generation is not None:
            log.info("%s: finished the switch to generation %d", output, generation)
        _settle(claim, restart=restart)
        try:
            yield claim
        except BaseException as error:
            work = state.find_state(output, marker)
            switching = (output / SWITCH_FILE).exists()
            if not switching and (work is None or not state.anything_done(work, error)):
                state.release(output, state.EXTENDING_FILE)
            raise
        state.release(output, state.EXTENDING_FILE)


def _check_finished(output: Path) -> None:
    """Refuse what is no finished output, and tidy up after a run that was killed at its end."""
    if (output / state.UNFINISHED_FILE).exists():
        with locked(output / state.UNFINISHED_FILE, output):
            if not state.is_finished(output):
                raise OutputError(
                    f"{output}: holds a run that did not finish",
                    "finish it by the same `python -m etl run`, then extend it",
                )
            state.release(output)
    if not state.is_finished(output):
        raise BadInputError(
            f"{output}: no finished run ({EtlOutput(output).manifest.name} is missing)",
            "make one with `python -m etl run`; --output_path is its OUT",
        )


def _settle(claim: Claim, *, restart: bool) -> None:
    """Discard what an earlier process left of a day, if it is of no use."""
    plan = None if restart else claim.unfinished_day()
    now = Manifest.read(EtlOutput(claim.output).manifest).generation or 0
    if plan is None or plan.settings["generation"] <= now:  # only its state was left
        claim.end()
    remove_temporary(claim.output)
