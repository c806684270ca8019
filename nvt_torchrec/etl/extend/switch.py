"""The switch of an output to another generation: a few renames, written down before the first.

The other generation is whole: with a day that was added, it is in the state of the extension; the
one before the newest is in ``OUT/.previous``. What a generation consists of is renamed by its names
in ``OUT``, so no record names a path. Until the record of the switch exists, ``OUT`` is the
generation that it was. From then on the switch only goes forward: whoever finds the record does the
renames that are not done yet. All that is renamed is durable before. While the record exists,
nothing reads ``OUT``, see :meth:`formats.etl_output.EtlOutput.check_whole`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import Format
from nvt_torchrec.base.files.atomic import fsync_directory, remove
from nvt_torchrec.base.files.validation import path_inside
from nvt_torchrec.etl.state.output import WORK_DIRECTORY, is_state_name, named_errors
from nvt_torchrec.formats.etl_output import NAMES, PREVIOUS, SWITCH_FILE, EtlOutput
from nvt_torchrec.formats.manifest import Manifest

_FORMAT = Format("nvt-torchrec switch", 2, "the record of a switch to another generation")
_REMEDY = "restore the output directory from a backup, or run the ETL again"
#: What a generation consists of; the first two may be missing.
_PARTS = ("drift", "rejected", *(name for name in NAMES if name != "rejected"))
#: Below the state of the day that is being added: the next generation; one that nobody needs.
NEXT, DISCARDED = "next", "discarded"


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

    def __post_init__(self) -> None:
        if not is_state_name(self.state):
            raise ValueError(f"state {self.state!r:.60}")
        if not set(_PARTS[2:]) <= set(self.names) <= set(_PARTS):
            raise ValueError(f"names {self.names!r:.100}")


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
    with named_errors(output):
        for directory, _, _ in os.walk(ready):
            fsync_directory(Path(directory))
        if not undo and os.path.lexists(output / PREVIOUS):
            _rename(output / PREVIOUS, work / DISCARDED)
    names = [name for name in _PARTS if (ready / name).exists()]
    planned = Switch(generation, work.name, undo, names)
    _FORMAT.write(output / SWITCH_FILE, dataclasses.asdict(planned))
    roll_forward(output)


def roll_forward(output: Path) -> int | None:
    """Finish a switch that has begun; the generation, or None if there is no such switch.

    Raises:
        BadInputError: The record of the switch, or something that it names, is missing or damaged.
        OutputError: The output cannot be written.
    """
    file = output / SWITCH_FILE
    if not file.exists():
        return None
    planned = _FORMAT.read(Switch, file, _REMEDY)
    work = path_inside(output, f"{WORK_DIRECTORY}/{planned.state}", file, _REMEDY)
    previous = path_inside(output, PREVIOUS, file, _REMEDY)
    ready, retired = (previous, work / DISCARDED) if planned.undo else (work / NEXT, previous)
    with named_errors(output):
        retired.mkdir(parents=True, exist_ok=True)
        for name in _PARTS:
            now, new = output / name, ready / name
            if now.exists() and (new.exists() or name not in planned.names):
                _rename(now, retired / name)
            if new.exists():
                _rename(new, now)
        for directory in (retired, output):
            fsync_directory(directory)
    if Manifest.read(EtlOutput(output).manifest).generation != planned.generation:
        raise BadInputError(f"{ready}: generation {planned.generation} is missing", _REMEDY)
    shutil.rmtree(ready, ignore_errors=True)
    remove(file)
    return planned.generation


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)
