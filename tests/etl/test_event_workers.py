"""Events that workers of a cluster sum up: the bytes of threads, whoever is killed meanwhile."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path

import pytest

from nvt_torchrec.etl.engines.cluster import local_cluster
from nvt_torchrec.etl.events import partitions
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from tests.etl.event_logs import DAY, make_rows, write
from tests.etl.extended import content, differences
from tests.etl.runs import OF_THE_RUN, until
from tests.shell import python

#: Runs on one worker, and ends this process, the coordinator, in the middle of the second group.
_DYING = """
import os, signal, sys
from pathlib import Path
from nvt_torchrec.etl.events import partitions, prepare
from nvt_torchrec.etl.run import run
from tests.etl.test_event_workers import make_settings

def sum_group(log, number, earlier, newest, map_tasks, report):
    def die(rows):
        report(rows)
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return summing(log, number, earlier, newest, map_tasks, die)

partitions.PARTITION_EVENTS = 100
summing, prepare.sum_group = prepare.sum_group, sum_group
run(make_settings(Path(sys.argv[1]), Path(sys.argv[2]), engine="dask", workers=1))
"""


def make_settings(log: Path, output: Path, **options) -> EtlSettings:
    """Return the settings of a run over the log of ``event_outputs``."""
    return EtlSettings(str(log), output, load_spec(log.parent / "spec.toml"), **options)


def compare(one: Path, other: Path) -> set[str]:
    """Return the names of files that differ; a manifest says which engine wrote it."""
    names = {Path(name).name for name in differences(content(one), content(other))}
    return names - OF_THE_RUN - {"manifest.json"}


@pytest.fixture(autouse=True)
def small_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator says where partitions begin."""
    monkeypatch.setattr(partitions, "PARTITION_EVENTS", 100)


def test_three_workers_of_which_one_dies(tmp_path: Path, event_outputs: tuple[Path, Path]) -> None:
    """In a run, and then a day is added."""
    log, done = event_outputs
    output, by_threads, day = tmp_path / "out", tmp_path / "threads", tmp_path / "day_3.csv"
    rows = make_rows(150, 1)
    write(day, [dataclasses.replace(row, time=row.time + 3 * DAY) for row in rows])
    killed = []
    with local_cluster(3, tmp_path / "dask") as client:

        def kill() -> None:
            until(lambda: any(output.glob(".work/*/events/.*.sums.tmp")))
            pid = client.run(os.getpid).popitem()[1]
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

        thread = threading.Thread(target=kill)
        thread.start()
        scheduler = client.scheduler.address
        run(make_settings(log, output, engine="dask", scheduler=scheduler))
        thread.join()
        assert killed
        assert compare(done, output) == set()
        assert not [*output.rglob("*.tmp")]
        run(make_settings(log, by_threads, engine="cpu", workers=2))
        extend(ExtendSettings(by_threads, str(day), engine="cpu"))
        extend(ExtendSettings(output, str(day), engine="dask", scheduler=scheduler))
    assert compare(by_threads, output) == set()


def test_a_coordinator_that_is_killed(tmp_path: Path, event_outputs: tuple[Path, Path]) -> None:
    """Its run goes on, with one worker again, to the bytes of threads."""
    log, done = event_outputs
    output = tmp_path / "out"
    killed = python("-c", _DYING, log, output)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (events,) = output.glob(".work/*/events")
    assert not (events / "events.json").exists()
    assert [*events.glob("*.0.sums.npy")]
    run(make_settings(log, output, engine="dask", workers=1))
    assert compare(done, output) == set()
