"""Extensions that end with SIGKILL before a write of each kind, and are resumed until they finish.

``python -m tests.etl.killed_extend DIRECTORY`` prints what it saw as JSON. For writes and their
kinds see ``tests/forks.py``: all within the switch to a day are tried, and one of most other kinds.
Some extensions have a second day, and end while it is added.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
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
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.spec_variants import replace_policy
from tests.etl import event_logs
from tests.etl.extended import add, content, copy_of, differences, make_base
from tests.etl.killed import PURCHASES, USERS, spec_of_few, write_clicks
from tests.forks import draw_writes, kill_before, was_killed

#: The name of the directory of the log without its last day.
ONE_DAY = "one_day"


def write_log(raw: Path) -> FeatureSpec:
    """Write five days with events, and beside them the first four, from which one is added.

    Returns:
        Their spec, some of whose values wait for an id.
    """
    raw.mkdir()
    raw.with_name(ONE_DAY).mkdir()
    rows = event_logs.make_rows(200, 5, seed=4)
    for day in range(5):
        of_day = [row for row in rows if row.time // event_logs.DAY == day]
        file = raw / f"day_{day}.csv"
        event_logs.write(file, of_day)
        if day < 4:
            os.link(file, raw.with_name(ONE_DAY) / file.name)
    for directory in (raw, raw.with_name(ONE_DAY)):
        write_clicks(directory / "clicks.csv", rows)
        (directory / "users.csv").write_text(USERS)
        (directory / "purchases.csv").write_text(PURCHASES)
    return replace_policy(spec_of_few(raw.parent), freq_threshold=2)


def attempt(output: Path, raw: Path, before_write: Callable[[str], object], **options) -> bool:
    """Extend in a fork; whether it was killed."""

    def work(begin: Callable[[], None]) -> None:
        begin()
        add(output, "" if "undo" in options else raw, workers=2, **options)

    return was_killed(work, before_write, output)


def writes_of(base: Path, raw: Path, directory: Path) -> list[tuple[str, bool]]:
    """The kind of each write of an extension, and whether a switch is under way then."""
    directory.mkdir()
    output, file = copy_of(base, directory), directory / "writes"

    def note(kind: str) -> None:
        with open(file, "a") as notes:
            notes.write(f"{int((output / SWITCH_FILE).exists())}{kind}\n")

    attempt(output, raw, note)
    return [(line[1:], line[0] == "1") for line in file.read_text().splitlines()]


def choose_writes(writes: list[tuple[str, bool]]) -> list[tuple[str, int]]:
    """Return the writes to kill before: their kinds, and the how manieth of the kind each is."""
    kinds = [kind for kind, _ in writes]
    # the state of a day is written as that of a run, before whose writes tests.etl.killed kills
    tried = [
        kind
        for kind in kinds
        if " .work/#/" in kind and "/next/" not in kind and "_histories" not in kind
    ]
    chosen = list(draw_writes(kinds, random.Random(1), {*tried}))
    switching = [inside for _, inside in writes]
    begin = switching.index(True)
    for at in range(begin, switching.index(False, begin)):
        chosen.append((kinds[at], 1 + kinds[:at].count(kinds[at])))
    return list(dict.fromkeys(chosen))


def visible(output: Path) -> dict[str, bytes]:
    """What readers of an output see of it."""
    return {
        name: data
        for name, data in content(output).items()
        if not (name.startswith((".work/", EXTENDING_FILE)) or name.endswith(TEMPORARY))
    }


def generations_of(base: Path, log: Path, directory: Path) -> list[dict[str, bytes]]:
    """Return what readers see of a base, and after each day of a log that is added to it."""
    directory.mkdir()
    output = copy_of(base, directory)
    generations = [visible(output)]
    for file in sorted(log.glob("day_*"))[3:]:
        add(output, file)
        generations.append(visible(output))
    return generations


def without_previous(files: dict[str, bytes]) -> dict[str, bytes]:
    """A generation without ``.previous``, which is moved away just before a switch is recorded."""
    return {name: data for name, data in files.items() if not name.startswith(f"{PREVIOUS}/")}


def main(directory: Path) -> None:
    """Print, as JSON: kills by where they hit, before which kinds of write, and what was wrong."""
    raw = directory / "raw"
    spec = write_log(raw)
    base = make_base(raw, directory / "base", spec)
    one_day = raw.with_name(ONE_DAY)
    for log in (raw, one_day):  # what the base has not taken
        (log / "users.csv").write_text(USERS.replace("1|2", "7|8"))
        (log / "purchases_3.csv").write_text("at,user,amount\n270000,u1,3\n280000,u3,4\n")
    # imports and compiles, here, before any fork
    whole = {
        log: generations_of(base, log, directory / f"{log.name}.whole") for log in (one_day, raw)
    }
    output = copy_of(base, directory)
    chosen = [
        (kind, number, one_day)
        for kind, number in choose_writes(writes_of(base, one_day, directory / "first"))
    ]
    counts = collections.Counter(kind for kind, _ in writes_of(base, raw, directory / "both"))
    # the last write of a kind is one for the second day
    chosen += [(kind, counts[kind], raw) for kind in sorted(counts)[::5]]
    chance = random.Random(1)
    seen: dict = {"kills": collections.Counter(), "kinds": [], "wrong": []}
    for turn, (kind, number, log) in enumerate(chosen):
        moment = f"{kind}, {number} of {log.name}"
        generations = whole[log]
        last = len(generations) - 1
        shutil.rmtree(output)
        shutil.copytree(base, output)
        if not attempt(output, log, kill_before(number, kind)):
            continue
        seen["kinds"].append(kind)
        if turn % 3 == 1:  # and once more while it is resumed
            with contextlib.suppress(IndexError):
                attempt(output, log, kill_before(1 + chance.randrange(60)))
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
        if turn % 5 == 2 and where not in ("switch", f"generation {last}"):
            options = {"restart": True}
        if where == "generation 1" and "restart" in options:
            options["days"] = {4}
        attempt(output, log, lambda written: None, **options)
        wrong = differences(generations[-1], content(output))
        seen["wrong"] += [f"{moment}: {name}" for name in wrong]
    seen["undone"] = killed_undoings(output, whole[raw][1], seen["wrong"])
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
        attempt(output, Path(), lambda written: None, undo=True)
        left = differences(without_previous(before), without_previous(content(output)))
        wrong += [f"undoing, killed {kills}: {name}" for name in left]
        kills += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
