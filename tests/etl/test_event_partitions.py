"""Events that are summed up by ranges of keys: the same bytes as at once, in little memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.engines.host import Threads
from nvt_torchrec.etl.events import key_numbers, partitions, timeline
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from tests.etl import amount_logs, event_logs
from tests.etl.event_logs import BY_DAYS, DAY
from tests.etl.extended import content, differences
from tests.etl.runs import OF_THE_RUN
from tests.shell import python

_SPEC = """
[input]
format = "csv"
[label]
name = "clicked"
[split]
by = "time"
column = "time"
time_format = "epoch_s"
valid = 0.1
test = 0.1
[events]
time = "time"
time_format = "epoch_s"
[[aggregate]]
of = "user"
values = ["count", "rate"]
window = "30d"
[[history]]
name = "recent"
of = "user"
columns = "item"
[[categorical]]
names = "item"
raw = "int"
"""
#: Runs, and prints the most memory in MB that the process had of its own, mapped files apart.
_RUN = """
import re, sys, threading, time
from pathlib import Path
from tests.etl.test_event_partitions import run_in_small_pieces
peak = 0
def watch():
    global peak
    while True:
        status = Path("/proc/self/status").read_text()
        peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]))
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
run_in_small_pieces(Path(sys.argv[1]))
print(peak >> 10)
"""


def write_days(log: str, folder: Path) -> None:
    """Write a log of four days: with histories, or with amounts."""
    folder.mkdir()
    if log == "histories":
        rows = event_logs.make_rows(400, 4, seed=5)
        for day in range(4):
            of_day = [row for row in rows if row.time // DAY == day]
            event_logs.write(folder / f"day_{day}.csv", of_day)
        return
    purchases = amount_logs.make_purchases(300, 4, seed=6)
    for day in range(4):
        of_day = [purchase for purchase in purchases if purchase.row.time // DAY == day]
        amount_logs.write(folder / f"day_{day}.csv", of_day)


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("log", ["histories", "amounts"])
def test_many_partitions_give_the_bytes_of_one(
    tmp_path: Path, log: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run and of a day that is added."""
    write_days(log, tmp_path / "log")
    logs = {"histories": event_logs, "amounts": amount_logs}
    spec = logs[log].spec_of(tmp_path, BY_DAYS, 'known = "1h"')
    outputs = {}
    for size in (1 << 18, 1):
        monkeypatch.setattr(partitions, "PARTITION_EVENTS", size)
        monkeypatch.setattr(key_numbers, "MERGED_KEYS", 256 * size)
        monkeypatch.setattr(timeline, "CHUNK_ROWS", 32 if size == 1 else 1 << 17)
        output = tmp_path / f"out{size}"
        options = {"engine": "cpu", "workers": workers if size == 1 else 1}
        run(EtlSettings(str(tmp_path / "log"), output, spec, days=frozenset(range(3)), **options))
        outputs[f"run, {size}"] = content(output)
        extend(ExtendSettings(output, str(tmp_path / "log/day_3.csv"), **options))
        outputs[f"extended, {size}"] = content(output)
    for stage in ("run", "extended"):
        one, many = outputs[f"{stage}, {1 << 18}"], outputs[f"{stage}, 1"]
        differ = {name.removeprefix(".previous/") for name in differences(one, many)}
        assert differ <= OF_THE_RUN


def run_in_small_pieces(directory: Path) -> None:
    """Run with pieces of which a small log has as many as a large one has of the usual ones."""
    partitions.PARTITION_EVENTS = 1 << 15
    key_numbers.MERGED_KEYS = 1 << 16
    settings = EtlSettings(
        str(directory / "log.csv"),
        directory / "out",
        event_logs.load_spec(directory / "spec.toml"),
        engine="cpu",
        workers=1,
        block_mb=1,
    )
    run(settings)


def write_log(directory: Path, rows: int) -> None:
    """Write a log of 60 days with a user for every five rows, and its spec."""
    directory.mkdir()
    (directory / "spec.toml").write_text(_SPEC)
    random = np.random.default_rng(0)
    log = pa.table(
        {
            "time": np.sort(random.integers(0, 60 * DAY, rows)),
            "user": random.integers(0, rows // 5, rows),
            "item": random.integers(0, 1000, rows),
            "clicked": random.integers(0, 2, rows),
        }
    )
    pyarrow.csv.write_csv(log, directory / "log.csv")


def test_results_of_tasks_do_not_grow_with_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are all that the coordinator of a cluster gets: rows by hour are the largest."""
    sizes: list[int] = []

    def map_tasks(engine: Threads, work: Callable, tasks: Iterable) -> Iterator:
        for result in map_in_order(work, tasks, 1, "etl"):
            sizes.append(len(pickle.dumps(result)))
            yield result

    monkeypatch.setattr(Threads, "map_tasks", map_tasks)
    largest = {}
    for rows in (5_000, 50_000):
        write_log(tmp_path / str(rows), rows)
        spec = event_logs.load_spec(tmp_path / str(rows) / "spec.toml")
        log, output = tmp_path / str(rows) / "log.csv", tmp_path / f"out{rows}"
        run(EtlSettings(str(log), output, spec, engine="cpu", workers=1))
        largest[rows] = max(sizes)
        sizes.clear()
    assert largest[50_000] < 2 * largest[5_000], largest


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """1,200,000 more rows, of 240,000 more users; held at once, these took 185 bytes each."""
    peaks = {}
    for rows in (300_000, 1_500_000):
        directory = tmp_path / str(rows)
        write_log(directory, rows)
        done = python("-c", "from nvt_torchrec.etl.engines import kept_rows\n"
                      "kept_rows.MAX_BYTES = 0\n" + _RUN, directory)  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks[rows] = int(done.stdout)
    assert peaks[1_500_000] < peaks[300_000] + 60, peaks
