"""The switch of an output to its next generation: a list of renames, written down before the first.

Until the record of the switch exists, ``OUT`` is the whole previous generation. From then on the
switch only goes forward: whoever finds the record does the renames that are not done yet. All that
is renamed is durable before. While the record exists, nothing reads ``OUT``, see
:meth:`formats.etl_output.EtlOutput.check_whole`.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import Format
from nvt_torchrec.base.files.atomic import fsync_directory, remove
from nvt_torchrec.etl.output import named_errors
from nvt_torchrec.formats.etl_output import SWITCH_FILE

_FORMAT = Format("nvt-torchrec switch", 1, "the record of a switch to a new generation")
_REMEDY = "restore the output directory from a backup, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class Switch:
    """A switch to another generation. All paths are relative to the output directory.

    Attributes:
        generation: the new generation.
        retired: names of directories that are replaced as a whole.
        previous: the directory to which they are moved first.
        moves: what is renamed, from and to, in this order; the manifest is the last.
    """

    generation: int
    retired: list[str]
    previous: str
    moves: list[list[str]]


def switch(output: Path, work: Path, planned: Switch) -> None:
    """Switch an output to a generation that is ready below ``work``.

    Raises:
        OutputError: the output cannot be written; ``--resume`` goes on from there.
    """
    with named_errors(output):
        for directory, _, _ in os.walk(work):
            fsync_directory(Path(directory))
    _FORMAT.write(output / SWITCH_FILE, dataclasses.asdict(planned))
    roll_forward(output)


def roll_forward(output: Path) -> int | None:
    """Finish a switch that has begun; the new generation, or None if there is no such switch.

    Raises:
        BadInputError: the record of the switch, or something that it names, is missing or damaged.
        OutputError: the output cannot be written.
    """
    file = output / SWITCH_FILE
    if not file.exists():
        return None
    planned = _FORMAT.read(Switch, file, _REMEDY)
    with named_errors(output):
        for name in planned.retired:
            if not (output / planned.previous / name).exists():
                _rename(output / name, output / planned.previous / name)
        *moves, manifest = planned.moves
        for source, target in moves:
            _move(output / source, output / target)
        for directory in {(output / target).parent for _, target in moves}:
            fsync_directory(directory)
        _move(output / manifest[0], output / manifest[1])
        fsync_directory(output)
    remove(file)
    return planned.generation


def _move(source: Path, target: Path) -> None:
    """Rename, unless an earlier process has."""
    if source.exists():
        _rename(source, target)
    elif not target.exists():
        raise BadInputError(
            f"{source}: missing, and so is {target}, which it should have become", _REMEDY
        )


def _rename(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)
