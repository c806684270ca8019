"""Extensions that end with SIGKILL at chosen moments, and are resumed until they finish.

``python -m tests.etl.killed_extend DIRECTORY STRIDE`` prints what it saw as JSON. For moments see
``tests/forks.py``: all within the first switch are tried, and every STRIDE-th of the others.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import TEMPORARY
from nvt_torchrec.etl.state.output import EXTENDING_FILE
from nvt_torchrec.formats.etl_output import PREVIOUS, SWITCH_FILE, EtlOutput
from tests.etl.extended import add, content, copy_of, differences, make_base, write_days
from tests.forks import kill_before, was_killed

ROWS = {0: 60, 1: 50, 2: 41, 3: 45, 4: 52}


def attempt(output: Path, raw: Path, before_call: Callable[[], object], **options) -> bool:
    """Extend in a fork; whether it was killed."""

    def work(begin: Callable[[], None]) -> None:
        begin()
        add(output, "" if "undo" in options else raw, workers=2, **options)

    return was_killed(work, before_call)


def moments_of(base: Path, raw: Path, directory: Path) -> list[bool]:
    """For each moment of an extension, whether a switch is under way."""
    output, file = copy_of(base, directory), directory / "moments"

    def note() -> None:
        with open(file, "a") as notes:
            notes.write("1" if (output / SWITCH_FILE).exists() else "0")

    attempt(output, raw, note)
    return [mark == "1" for mark in file.read_text()]


def visible(output: Path) -> dict[str, bytes]:
    """What readers of an output see of it."""
    return {
        name: data
        for name, data in content(output).items()
        if not (name.startswith((".work/", EXTENDING_FILE)) or name.endswith(TEMPORARY))
    }


def without_previous(files: dict[str, bytes]) -> dict[str, bytes]:
    """A generation without ``.previous``, which is moved away just before a switch is recorded."""
    return {name: data for name, data in files.items() if not name.startswith(f"{PREVIOUS}/")}


def main(directory: Path, stride: int) -> None:
    """Print, as JSON: kills by where they hit, and what was not as it should have been."""
    raw = directory / "raw"
    write_days(raw, ROWS)
    base = make_base(raw, directory / "base")
    output = copy_of(base, directory)
    generations = [visible(output)]
    for day in (3, 4):  # imports and compiles, here, before any fork
        add(output, raw / f"day_{day}")
        generations.append(visible(output))
    (directory / "first").mkdir()
    switching = moments_of(base, raw, directory / "first")
    first_end = switching.index(False, switching.index(True))
    chosen = [
        moment
        for moment, inside in enumerate(switching)
        if (inside and moment < first_end) or moment % stride == 0
    ]
    chance = random.Random(1)
    seen: dict = {"kills": collections.Counter(), "wrong": []}
    for turn, moment in enumerate(chosen):
        shutil.rmtree(output)
        shutil.copytree(base, output)
        if not attempt(output, raw, kill_before(1 + moment)):
            continue
        if turn % 3 == 1:  # and once more while it is resumed
            with contextlib.suppress(IndexError):
                attempt(output, raw, kill_before(1 + chance.randrange(60)))
        if (output / SWITCH_FILE).exists():
            where = "switch"
            try:
                EtlOutput(output).check_whole()
                seen["wrong"].append(f"{moment}: readers are let in")
            except BadInputError:
                pass
        else:
            found = visible(output)
            where = ""
            for number, own in enumerate(generations):
                if found in (own, without_previous(own)):
                    where = f"generation {number}"
            if not where:
                near = min((differences(own, found) for own in generations), key=len)
                seen["wrong"].append(f"{moment}: no whole generation: {near}")
        seen["kills"][where] += 1
        options: dict[str, Any] = {}
        if turn % 5 == 2 and where != "switch" and where != "generation 2":
            options = {"restart": True}
        if where == "generation 1" and "restart" in options:
            options["days"] = {4}
        attempt(output, raw, lambda: None, **options)
        wrong = differences(generations[-1], content(output))
        seen["wrong"] += [f"{moment}: {name}" for name in wrong]
    seen["undone"] = killed_undoings(output, generations[1], seen["wrong"])
    print(json.dumps(seen))


def killed_undoings(output: Path, before: dict[str, bytes], wrong: list[str]) -> int:
    """Take the newest day back, killed at every third moment, and again; how often it was."""
    newest = copy_of(output, output.parent / "newest")
    kills = 0
    while True:
        shutil.rmtree(output)
        shutil.copytree(newest, output)
        if not attempt(output, Path(), kill_before(1 + 3 * kills), undo=True):
            return kills
        attempt(output, Path(), lambda: None, undo=True)
        left = differences(without_previous(before), without_previous(content(output)))
        wrong += [f"undoing, killed {kills}: {name}" for name in left]
        kills += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
