from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster

from nvt_torchrec.base.device import DeviceError
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.etl.engines.cluster import WorkerLostError, _check_workers, local_cluster
from nvt_torchrec.etl.engines.engine import Job
from nvt_torchrec.etl.engines.workers import Workers
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from tests.etl.runs import parts, read_split, settings, tree, until
from tests.logs import CRITEO, random_rows, write_day
from tests.shell import ROOT, end_session, python
from tests.warm import warm_python


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days, five units of about a megabyte."""
    directory = tmp_path_factory.mktemp("log") / "raw"
    rows = random_rows(300, 0)
    for day, times in enumerate((30, 20, 12)):
        write_day(directory / f"day_{day}", rows * times)
    return directory


@pytest.fixture(scope="module")
def whole(raw: Path, dask_client, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Where an uninterrupted run wrote, and what; gone from there."""
    output = tmp_path_factory.mktemp("etl") / "out"
    run(settings(raw, output, block_mb=1, scheduler=dask_client.scheduler.address))
    return output, tree(output)


def _start(program: str, raw: Path, output: Path, *flags: str) -> subprocess.Popen:
    command = ["-m", "etl", "run", "--engine", "dask", "--block_mb", "1"]
    command += ["--input_path", str(raw), "--output_path", str(output), *flags]
    return subprocess.Popen(
        [program, *command],
        cwd=ROOT,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        # tests that run in the background may have been told to ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def _written(output: Path) -> dict[str, int]:
    return {
        "/".join(path.parts[-2:]): path.stat().st_mtime_ns
        for path in output.rglob("part.*.parquet")
        if not path.name.startswith(".")
    }


def test_killed_and_resumed(raw: Path, whole, dask_client) -> None:
    """In the fit, and with all its workers in the transform; what is done is not done again."""
    output, expected = whole
    shutil.rmtree(output, ignore_errors=True)
    scheduler = dask_client.scheduler.address
    for flags, reached in (
        (["--scheduler", scheduler], ".work/*/fit/*.npz"),
        (["--workers", "1", "--resume"], ".work/*/units/*.json"),
    ):
        before = set(output.glob(reached))
        process = _start(warm_python(), raw, output, *flags)
        until(lambda reached=reached, before=before: set(output.glob(reached)) - before)
        end_session(process.pid)
        process.wait()
        process.stderr.close()
        assert not (output / "manifest.json").exists()
    records = [json.loads(path.read_text()) for path in output.glob(".work/*/units/*.json")]
    done = {name for record in records for name in record}
    written = {name: time for name, time in _written(output).items() if name in done}
    assert written
    run(settings(raw, output, block_mb=1, scheduler=scheduler))
    assert tree(output) == expected
    assert _written(output).items() >= written.items()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with local_cluster(1, tmp_path_factory.mktemp("dask")) as client:
        yield client


def test_workers_of_two_threads_write_the_same(raw: Path, whole) -> None:
    """Two tasks at once in a process, this one, of what the workers' CPUs do."""
    output, expected = whole
    shutil.rmtree(output, ignore_errors=True)
    options = {"dashboard_address": "127.0.0.1:0", "threads_per_worker": 2}
    with LocalCluster(n_workers=1, processes=False, **options) as cluster:
        run(settings(raw, output, block_mb=1, scheduler=cluster.scheduler_address))
    assert tree(output) == expected


def test_the_fit_reads_each_block_once(raw: Path, whole, tmp_path: Path, dask_client) -> None:
    """However many of NVTabular's operators want its rows; it samples the first block twice."""
    from merlin.core.utils import set_dask_client

    dask_client.run_on_scheduler(_forget_events)
    set_dask_client(None)  # as another user of Merlin in this process may have left it
    scheduler = dask_client.scheduler.address
    run(settings(raw, tmp_path / "out", engine="nvtabular", block_mb=1, scheduler=scheduler))
    read = [rows for _, rows in dask_client.get_events("etl-rows")]
    assert len(read) > 3
    assert sum(read) == 300 * (30 + 20) + 2 * read[0]
    found, expected = (read_split(output, "train") for output in (tmp_path / "out", whole[0]))
    pd.testing.assert_frame_equal(found, expected, rtol=1e-6)


def _forget_events(dask_scheduler) -> None:
    dask_scheduler._broker.truncate("etl-rows")


def test_workers_read_the_next_log_by_its_own_spec(tmp_path: Path, dask_client) -> None:
    """The same cluster, output and values, but another delimiter."""
    expected = None
    for delimiter in (",", ";"):
        rows = [["0", str(i % 7), f"{i % 5:x}"] for i in range(60)]
        for day in (0, 1):
            text = "".join(delimiter.join(row) + "\n" for row in rows)
            (tmp_path / f"day_{day}.csv").write_text(text)
        spec = FeatureSpec(
            "label", (DenseColumn("x"),), (CategoricalColumn("c"),),
            input=InputFormat("csv", header=False, delimiter=delimiter),
        )  # fmt: skip
        output = tmp_path / "out"
        shutil.rmtree(output, ignore_errors=True)
        run(settings(tmp_path, output, spec, scheduler=dask_client.scheduler.address))
        found = read_split(output, "train")
        expected = found if expected is None else expected
        pd.testing.assert_frame_equal(found, expected)


def test_a_worker_that_dies_is_replaced(raw: Path, whole, cluster: Client) -> None:
    output, expected = whole
    shutil.rmtree(output, ignore_errors=True)
    killed = []

    def kill() -> None:
        until(lambda: any(output.glob(".work/*/units/*.json")))
        pid = cluster.run(os.getpid).popitem()[1]
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    address = cluster.scheduler.address
    manifest = run(settings(raw, output, block_mb=1, scheduler=address))
    thread.join()
    assert killed
    assert tree(output) == expected
    rows = {
        split: sum(pq.read_metadata(path).num_rows for path in parts(output, split))
        for split in manifest["splits"]
    }
    assert rows == {split: one["rows"] for split, one in manifest["splits"].items()}
    assert sum(rows.values()) == manifest["rows"]["in"] == 62 * 300


@pytest.mark.parametrize(
    ("task", "seconds", "why"),
    [
        (lambda *_: os._exit(1), None, "KilledWorker"),
        (lambda *_: time.sleep(10**6), 3, "TimeoutError"),
    ],
)
def test_a_comparison_that_fails_is_a_warning(
    tmp_path: Path, cluster: Client, monkeypatch, caplog, task: Callable, seconds, why: str
) -> None:
    """A worker that died or hangs in it is replaced, so that the hosts' work can follow."""
    if why == "KilledWorker":  # at its first death
        monkeypatch.setattr(cluster.cluster.scheduler, "allowed_failures", 0)
    monkeypatch.setattr("nvt_torchrec.etl.engines.workers.COMPARE_SECONDS", seconds)
    workers = Workers(Job(CRITEO, tmp_path), cluster, gpu=True)
    assert not workers._agrees("counting", task)
    (warning,) = [text for text in caplog.messages if "counting on the GPU" in text]
    assert f"differs from the CPU's: {why}" in warning
    monkeypatch.undo()
    assert cluster.gather(cluster.map(abs, [-1, -2, -3, -4], pure=False)) == [1, 2, 3, 4]
    workers.job = dataclasses.replace(workers.job, strict_gpu=True)
    with pytest.raises(DeviceError, match="JSONDecodeError: Expecting property name"):
        workers._agrees("counting", lambda *_: json.loads("{"))


def test_a_cluster_that_loses_all_workers(
    raw: Path, tmp_path: Path, cluster: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvt_torchrec.etl.engines.nvtabular import NVTabular

    monkeypatch.setattr("nvt_torchrec.etl.engines.cluster.LOST_SECONDS", 3)
    output, fit = tmp_path / "out", NVTabular.fit

    def left_alone(*arguments):
        threading.Timer(1, cluster.cluster.scale, [0]).start()
        return fit(*arguments)

    monkeypatch.setattr(NVTabular, "fit", left_alone)
    with pytest.raises(WorkerLostError, match=r"no worker for 3 s\n.*run this again"):
        run(settings(raw, output, engine="nvtabular", scheduler=cluster.scheduler.address))
    assert not (output / "manifest.json").exists()


def test_a_cluster_that_cannot_do_it(raw: Path, tmp_path: Path, dask_client, monkeypatch) -> None:
    address = dask_client.scheduler.address
    nowhere = {"127.0.0.1:1": False, "127.0.0.1:2": True}
    answers: dict[Callable, dict] = {}
    answer = Client.run

    def told(client: Client, function: Callable, *arguments: object) -> dict:
        if function in answers:
            return answers[function]
        return answer(client, function, *arguments)

    monkeypatch.setattr(Client, "run", told)
    from nvt_torchrec.etl.engines.device import first_gpu, gpu_count

    cards = {gpu_count: {"a": 2, "b": 2}, os.path.isdir: {"a": True}}
    two = cards | {first_gpu: {"a": "GPU-1", "b": "GPU-2"}}
    threads = {"a": 1, "b": 1}
    monkeypatch.setattr(Client, "nthreads", lambda client: threads)
    for given, message in (
        ({os.path.isdir: nowhere}, r"1 of 2 workers do not see .*: 127.0.0.1:1(.|\n)*share"),
        ({gpu_count: {"a": 1, "b": 0}, os.path.isdir: {"a": True}}, "1 of 2 workers have GPUs"),
        (cards | {first_gpu: dict.fromkeys("ab", "GPU-1")}, r"same GPU\n.*`dask cuda worker`"),
        (two, "this machine has none that cuDF"),
        ({gpu_count: {}}, "no workers"),
    ):
        answers.clear()
        answers.update(given)
        engine = "nvtabular" if given is two else "dask"
        with pytest.raises(SettingsError, match=message):
            run(settings(raw, tmp_path / "out", scheduler=address, engine=engine))
        assert not any((tmp_path / "out").iterdir())
    answers.update(two)  # only frames of cuDF need a card here, too, and workers of one thread
    threads["b"] = 2
    assert _check_workers(dask_client, "", tmp_path, frames=False)
    with pytest.raises(SettingsError, match=r"a worker has 2 threads(.|\n)*--nthreads 1"):
        _check_workers(dask_client, "--scheduler", tmp_path, frames=True)


def test_workers_that_cannot_start(raw: Path, tmp_path: Path) -> None:
    """They say why, and nobody waits for ever."""
    (tmp_path / "broken.py").write_text("import no_such_module_there_is\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "DASK_DISTRIBUTED__WORKER__PRELOAD": "['broken']",
    }
    flags = ["--input_path", str(raw), "--output_path", str(tmp_path / "out"), "--workers", "1"]
    done = python("-m", "etl", "run", "--engine", "dask", *flags, env=environment)
    assert done.returncode == 2, done.stderr
    assert "error: Dask workers did not start: ModuleNotFoundError(" in done.stderr
    assert "no_such_module_there_is" in done.stderr


def test_ctrl_c_while_workers_start(raw: Path, tmp_path: Path) -> None:
    """It reaches all processes of a terminal, and none of them prints a traceback."""
    output = tmp_path / "out"
    process = _start(sys.executable, raw, output, "--workers", "2")
    until(lambda: _descendants(process.pid) >= 2)
    time.sleep(1)  # they import
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert stderr.endswith("interrupted\n")


def _descendants(pid: int) -> int:
    """How many processes a process has started, whichever of its threads did."""
    found = 0
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found += len(children.read_text().split())
    return found
