"""Runs that end with SIGKILL before a write of each kind, and are resumed until they finish.

``python -m tests.etl.killed DIRECTORY`` prints what it saw as JSON. For writes and their kinds see
``tests/forks.py``.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nvt_torchrec.etl.run
from nvt_torchrec.etl.events import partitions
from nvt_torchrec.etl.units.unit_plan import make_plan
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.negatives import NegativesRule
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from tests.etl import event_logs
from tests.etl.runs import QUARANTINE, settings, tree
from tests.etl.split_logs import SHARES_OF_TIME, spec_with, write
from tests.forks import draw_writes, kill_before, was_killed
from tests.logs import pack

#: Bad rows are rejected.
OPTIONS = {**QUARANTINE, "workers": 2}
ROWS = {0: 40, 1: 25, 2: 60}
BLOCK_BYTES = 800  # several blocks in a file
EVENT_BLOCK_BYTES = 4000
PARTITION_EVENTS = 30  # several ranges of keys
SPEC_OF_FEW = """
[input]
format = "csv"
[label]
name = "click"
from = "clicks*.csv"
key = ["user", "item"]
within = "2h"
time = "at"
time_format = "epoch_s"
[split]
by = "days"
[events]
time = "time"
time_format = "epoch_s"
known = "1h"
[[aggregate]]
of = "user"
values = ["rate", "count"]
window = "12h"
smoothing = 2
[[aggregate]]
of = ["user", "item"]
values = ["count", "since"]
[[history]]
name = "recent"
of = "user"
columns = ["item", "shop"]
[[categorical]]
names = "item"
raw = "string"
[[categorical]]
names = "shop"
raw = "int"
[[table]]
name = "users"
path = "users.csv"
key = "user"
[[categorical]]
names = "city"
raw = "string"
table = "users"
[[vector]]
name = "taste"
table = "users"
width = 2
[[source]]
name = "purchases"
path = "purchases*.csv"
time = "at"
time_format = "epoch_s"
[[aggregate]]
of = "user"
source = "purchases"
values = ["count", "last(amount)", "distinct(amount)"]
"""
PURCHASES = "at,user,amount\n3600,u1,5\n90000,u2,7\n150000,u1,5\n"
USERS = "user,city,taste\nu1,Wien,1|2\nu2,Graz,\nu3,Linz,0.5|3\n"
NEGATIVES = NegativesRule(item="item", user="user", per_positive=2)


def spec_of_few(directory: Path) -> FeatureSpec:
    """Return the spec of an event log with a file of each kind, but few of them."""
    file = directory / "spec.toml"
    file.write_text(SPEC_OF_FEW)
    return load_spec(file)


def write_clicks(path: Path, rows: list[event_logs.Row]) -> None:
    """Write a click ten minutes after each row that has one."""
    lines = ["at,user,item"]
    for row in rows:
        if row.clicked:
            lines.append(f"{row.time + 600},{row.user},{row.item}")
    path.write_text("\n".join(lines) + "\n")


def attempt(
    raw: Path, output: Path, spec: FeatureSpec, log: Path, before_write: Callable[[str], object]
) -> bool:
    """Run in a fork, which may go on with what is there; whether it was killed."""

    def work(begin: Callable[[], None]) -> None:
        handler = logging.FileHandler(log)
        handler.setFormatter(logging.Formatter("%(process)d %(message)s"))
        logging.getLogger("nvt_torchrec.etl").addHandler(handler)
        logging.getLogger("nvt_torchrec.etl").setLevel(logging.DEBUG)
        begin()
        nvt_torchrec.etl.run.run(settings(raw, output, spec, **OPTIONS))

    return was_killed(work, before_write, output)


def redone(log: Path) -> int:
    """The most units of an attempt that were begun again by a later one, over all attempts."""
    begun: dict[str, set[str]] = collections.defaultdict(set)
    for process, unit in re.findall(r"^(\d+) begin (.*)$", log.read_text(), re.MULTILINE):
        begun[process].add(unit)
    later: set[str] = set()
    maximum = 0
    for units in reversed(begun.values()):  # attempts in the order of their first line
        maximum = max(maximum, len(units & later))
        later |= units
    return maximum


def kill_runs(raw: Path, directory: Path, spec: FeatureSpec, tried: list[str]) -> dict:
    """Kill a run before a write of each kind, every third one again while it is resumed.

    Args:
        raw: The log.
        directory: Where runs write.
        spec: Of the log.
        tried: Kinds before which runs of another log were killed.

    Returns:
        Before which kinds of write runs were killed, files that differ from those of a run that was
        not killed, and the most units that were done again.
    """
    output, log, file = directory / "out", directory / "log", directory / "writes"

    def note(written: str) -> None:
        with open(file, "a") as opened:
            opened.write(f"{written}\n")

    assert not attempt(raw, output, spec, log, note)
    whole, chance = tree(output), random.Random(1)
    seen: dict = {"kinds": [], "wrong": [], "redone": 0}
    for kind, turn in draw_writes(file.read_text().splitlines(), chance, tried):
        shutil.rmtree(output)
        log.unlink(missing_ok=True)
        if not attempt(raw, output, spec, log, kill_before(turn, kind)):
            continue  # threads did fewer things this time
        seen["kinds"].append(kind)
        if chance.randrange(3) == 0:
            attempt(raw, output, spec, log, kill_before(1 + chance.randrange(60)))
        attempt(raw, output, spec, log, lambda written: None)
        found = tree(output)
        seen["wrong"] += [
            f"{kind}, {turn}: {name}"
            for name in sorted(whole.keys() | found.keys())
            if whole.get(name) != found.get(name)
        ]
        seen["redone"] = max(seen["redone"], redone(log))
    return seen


def write_logs(root: Path) -> dict[str, tuple[Path, FeatureSpec]]:
    """Write a log with events, and one that is split by time; return where they are, and specs."""
    by_time, events = root / "time", root / "events"
    write(by_time, ROWS)
    pack(by_time / "day_1.csv")
    events.mkdir()
    rows = event_logs.make_rows(150, 3, seed=4)
    for day in range(3):
        of_day = [row for row in rows if row.time // event_logs.DAY == day]
        event_logs.write(events / f"day_{day}.csv", of_day)
    write_clicks(events / "clicks.csv", rows)
    (events / "users.csv").write_text(USERS)
    (events / "purchases.csv").write_text(PURCHASES + "86400,u1,bad\n")
    for directory in (by_time, events):
        with open(directory / "day_0.csv", "a") as first:
            first.write("bad row\n" * 3)
    return {
        "events": (events, spec_of_few(root)),
        "time": (by_time, dataclasses.replace(spec_with(SHARES_OF_TIME), negatives=NEGATIVES)),
    }


def main(directory: Path) -> None:
    """Print, as JSON, what was seen of each log, by its name."""
    raw = directory / "raw"
    raw.mkdir()
    logs = write_logs(raw)

    def small_blocks(*arguments, **options):
        size = EVENT_BLOCK_BYTES if arguments[1].events else BLOCK_BYTES
        return make_plan(*arguments, **{**options, "block_bytes": size})

    nvt_torchrec.etl.stages.make_plan = small_blocks
    partitions.PARTITION_EVENTS = PARTITION_EVENTS
    seen: dict[str, dict] = {}
    tried: list[str] = []
    for name, (log, spec) in logs.items():
        (directory / name).mkdir()
        # imports and compiles, here, before any fork
        nvt_torchrec.etl.run.run(settings(log, directory / name / "warm", spec, **OPTIONS))
        seen[name] = kill_runs(log, directory / name, spec, tried)
        tried += seen[name]["kinds"]
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
