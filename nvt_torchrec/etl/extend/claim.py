"""Claim an output for an extension, and switch it to another generation.

An extension locks a marker in ``OUT`` while it runs; the lock ends with the process, even by
SIGKILL. The marker names the directory below ``OUT/.work`` with the state of the day that is being
added. Each day, and each ``--restart``, has a directory with another name, so that a worker that is
still busy with an earlier one does no harm.

A switch is a few renames, recorded before the first one. The other generation is complete before
the switch begins: the next generation is in the state of the extension, the previous one in
``OUT/.previous``. The entries of a generation have the same names everywhere, so the record needs
no paths. Until the record exists, ``OUT`` is the old generation. From then on the switch only goes
forward: whoever finds the record does the remaining renames. Everything is durable before it is
renamed. While the record exists, nothing reads ``OUT``; see
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
#: The entries of ``OUT`` that belong to a generation; the first may be missing.
_PARTS = ("rejected", *(name for name in NAMES if name != "rejected"))
#: Directory of the next generation, in the state of the day that is being added.
NEXT = "next"
#: Directory of a generation that is no longer needed, in the same state.
DISCARDED = "discarded"


@dataclasses.dataclass(frozen=True)
class Switch:
    """The record of a switch to another generation.

    Attributes:
        generation: The new generation.
        state: The name of the directory of the extension's state.
        undo: Whether to go back to the previous generation, not forward to that of a new day.
        names: The names of the entries of the generation.
    """

    generation: int
    state: str
    undo: bool
    names: list[str]


def switch(output: Path, work: Path, generation: int, *, undo: bool = False) -> None:
    """Switch an output to a complete generation, and keep the old one as the previous generation.

    Args:
        output: The output directory.
        work: The state of the extension, with the next generation.
        generation: The number of the generation.
        undo: Whether to switch to the previous generation instead, and keep no other one.

    Raises:
        OutputError: The output cannot be written; ``--resume`` continues the switch.
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
    """Finish a switch that has begun; return its generation, or None if no switch has begun.

    Raises:
        BadInputError: The record of the switch, or an entry that it names, is missing or damaged.
        OutputError: The output cannot be written.
    """
    file = output / SWITCH_FILE
    if not file.exists():
        return None
    planned = _FORMAT.read(Switch, file, _REMEDY)
    work = resolve_inside(output, f"{state.WORK_DIRECTORY}/{planned.state}", file, _REMEDY)
    previous = resolve_inside(output, PREVIOUS, file, _REMEDY)
    if planned.undo:
        ready = previous
        retired = work / DISCARDED
    else:
        ready = work / NEXT
        retired = previous
    with state.name_errors(output):
        retired.mkdir(parents=True, exist_ok=True)
        # Each rename is done once: if the new entry is gone, it was renamed before an interruption,
        # and the entry in OUT is the new one.
        for name in _PARTS:
            current = output / name
            new = ready / name
            if current.exists() and (new.exists() or name not in planned.names):
                _rename(current, retired / name)
            if new.exists():
                _rename(new, current)
        for directory in (retired, output):
            fsync_directory(directory)
    paths = EtlOutput(output)
    manifest = Manifest.read(paths.manifest)
    if manifest.generation != planned.generation:
        raise BadInputError(f"{ready}: generation {planned.generation} is missing", _REMEDY)
    paths.check_described(manifest, _REMEDY, stores=False)  # stores do not move
    shutil.rmtree(ready, ignore_errors=True)
    remove(file)
    return planned.generation


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)


log = logging.getLogger(__name__)

#: The name of the state of an undo. By it, a repeated command knows that the undo is done already.
_UNDOING = "0" * state.NAME_LETTERS


@dataclasses.dataclass(frozen=True)
class DayRecord(PlanRecord):
    """The plan of adding a day."""

    @property
    def day(self) -> int:
        """The day."""
        return self.settings["day"]

    @property
    def path(self) -> str:
        """The path of the day's file."""
        return next(iter(self.inputs))


@dataclasses.dataclass(frozen=True)
class Claim:
    """An output that this process extends.

    Attributes:
        output: The output directory.
        marker: The locked marker.
        undoing: Whether an earlier process was interrupted while it took back the newest day.
    """

    output: Path
    marker: IO[str]
    undoing: bool

    def unfinished_day(self) -> DayRecord | None:
        """Read the plan of the day that is being added; None if no plan was recorded."""
        work = state.find_state(self.output, self.marker)
        return Journal(work).read_plan(DayRecord, state.RESTART) if work else None

    def begin(self, *, undoing: bool = False) -> Path:
        """Return the directory of the state of the day that is being added, or taken back."""
        if undoing:
            state.name_state(self.marker, _UNDOING)
        return state.begin_state(self.output, self.marker)

    def end(self) -> None:
        """Delete the state of the day that is or was being added; errors do not matter."""
        state.name_state(self.marker, "")
        shutil.rmtree(self.output / state.WORK_DIRECTORY, ignore_errors=True)


@contextlib.contextmanager
def claim_extension(output: Path, *, restart: bool) -> Iterator[Claim]:
    """Claim a finished output for an extension.

    A switch that has begun is finished first. If the caller fails before it did any work for a day
    that is worth keeping, everything it wrote for this day is removed.

    Args:
        output: The OUT of a finished run.
        restart: Discard the day that an interrupted extension was adding.

    Raises:
        BadInputError: The directory holds no finished run.
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
    """Check that an output is finished; clean up after a run that was killed at its very end."""
    if (output / state.UNFINISHED_FILE).exists():
        with locked(output / state.UNFINISHED_FILE, output):
            if not state.is_finished(output):
                raise OutputError(
                    f"{output}: holds a run that did not finish",
                    "finish it with the same `python -m etl run`, then extend it",
                )
            state.release(output)
    if not state.is_finished(output):
        raise BadInputError(
            f"{output}: no finished run ({EtlOutput(output).manifest.name} is missing)",
            "make one with `python -m etl run`; --output_path is its OUT",
        )


def _settle(claim: Claim, *, restart: bool) -> None:
    """Discard the state of a day that an earlier process left, unless it can be resumed."""
    plan = None if restart else claim.unfinished_day()
    current = Manifest.read(EtlOutput(claim.output).manifest).generation or 0
    if plan is None or plan.settings["generation"] <= current:  # the day is in OUT already
        claim.end()
    remove_temporary(claim.output)
