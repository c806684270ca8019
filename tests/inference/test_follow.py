"""A server that follows its bundle: other bundles take its place while requests are answered."""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nvt_torchrec.inference.model.bundle import compute_bundle_digest, make_bundle_name
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server import reload
from nvt_torchrec.inference.server.reload import Served, open_served
from tests.inference.bundles import ROWS, make_bundle, publish
from tests.inference.serving import JSON, Server, asking, serving, until
from tests.inference.test_drain import assert_no_request_is_lost
from tests.mutations import flip_bit

SWITCHES = 20
#: Beside what an answer must equal up to the rounding of one sigmoid.
ROUNDING = 1e-6
PATIENT = ["--timeout_s", "100"]


@dataclasses.dataclass
class Bundles:
    """Two bundles by name, rows whose probabilities differ, and these probabilities."""

    rows: list[dict]
    paths: dict[str, Path]
    expected: dict[str, np.ndarray]
    generations: dict[str, str]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    base = tmp_path_factory.mktemp("bundles")
    paths, expected, generations = {}, {}, {}
    for number, seed in enumerate((1, 2)):
        path = make_bundle(base / str(number), seed=seed, generation=number, rows=500_000)
        name = make_bundle_name(compute_bundle_digest(path))
        paths[name], generations[name] = path, str(number)
        expected[name] = Predictor.load(path).predict(ROWS)
    first, second = expected.values()
    differ = np.abs(first - second) > 1000 * ROUNDING
    assert differ.sum() > 40
    places = np.flatnonzero(differ)
    expected = {name: values[places] for name, values in expected.items()}
    return Bundles([ROWS[place] for place in places], paths, expected, generations)


def _switch(served: Path, target: Path) -> None:
    link = served.with_name("next")
    link.symlink_to(target)
    os.replace(link, served)


def asking_for(two: Bundles, server: Server, seen: list[str]):
    """Clients that check each answer; ``seen`` gets the bundles that answer one of them in turn."""

    def ask(connection: http.client.HTTPConnection, rng: np.random.Generator) -> None:
        picked = rng.integers(0, len(two.rows), int(rng.choice([1, 3, 20])))
        body = json.dumps({"rows": [two.rows[place] for place in picked]})
        connection.request("POST", "/predict", body, JSON)
        answer = connection.getresponse()
        content = answer.read()
        assert (answer.status, answer.headers.get("Connection")) == (200, None), content
        name = answer.headers["X-Bundle"]
        got = np.array(json.loads(content)["probabilities"], np.float32)
        assert np.abs(got - two.expected[name][picked]).max() <= ROUNDING, name
        assert answer.headers["X-Workflow-Generation"] == two.generations[name]
        if seen[-1:] != [name]:
            seen.append(name)

    return asking(server.connect, ask)


class Watch(threading.Thread):
    """Counts the embedding tables that a process has mapped, again and again."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.stop = threading.Event()
        self.maximum = 0

    def run(self) -> None:
        while not self.stop.wait(0.01):
            self.maximum = max(self.maximum, len(_tables(self._pid)))


def _tables(pid: int) -> set[str]:
    """The inodes of the tables that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[4] for line in lines if "table.npy" in line}


def _resources(pid: int) -> tuple[int, int]:
    """Open files and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def test_switches_under_load(two: Bundles, tmp_path: Path) -> None:
    """No request fails, no answer is of two bundles, no more than two are in memory."""
    served = tmp_path / "current"
    names = list(two.paths)
    served.symlink_to(two.paths[names[0]])
    with serving(tmp_path, "--bundle", str(served), *PATIENT) as server:
        pid = server.pid
        watch, before, seen = Watch(pid), (0, 0), []
        watch.start()
        with asking_for(two, server, seen) as wrong:
            for number, name in zip(range(1, SWITCHES + 1), itertools.cycle(names[::-1])):
                _switch(served, two.paths[name])
                server.process.send_signal(signal.SIGHUP)
                until(lambda number=number: _reloads(server) == number)
                until(lambda name=name: seen[-1:] == [name] or wrong)
                if number == SWITCHES // 10:
                    before = _resources(pid)
        watch.stop.set()
        watch.join(100)
        assert wrong == []
        assert watch.maximum == 2
        until(lambda: len(_tables(pid)) == 1)
        after = _resources(pid)
        assert after[0] <= before[0] + 4  # connections and files that are opened for a moment
        assert after[1] <= before[1] + 2
        assert server.metric("inference_bundle_reload_failures_total") == 0
        assert _info(server) == {names[0]: 1.0}


def _reloads(server: Server) -> float:
    return server.metric("inference_bundle_reloads_total")


def _info(server: Server) -> dict[str, float]:
    """The bundles that are served, and by how many processes."""
    text = server.ask("/metrics")[1].decode()
    lines = re.findall(r'^inference_bundle_info\{bundle="(\w+)",.*\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in lines if float(value)}


@pytest.mark.usefixtures("warm_trials")
def test_publications_are_noticed_and_named(two: Bundles, tmp_path: Path) -> None:
    to = tmp_path / "served"
    names = list(two.paths)
    publish(two.paths[names[0]], to)
    with serving(tmp_path, "--bundle", str(to / "current"), *PATIENT) as server:
        for number, name in enumerate(names):
            _, answer, headers = server.ask("/version")
            version = json.loads(answer)
            assert (headers["X-Bundle"], headers["X-Workflow-Generation"]) == (name, str(number))
            assert version["bundle"] == compute_bundle_digest(two.paths[name])
            assert version["generation"] == number
            assert version["workflow"] == Predictor.load(two.paths[name]).workflow.digest
            if number == 0:
                publish(two.paths[names[1]], to)
                until(lambda: _reloads(server) == 1)
        assert "serving bundle" in server.stderr.read_text()


def test_what_cannot_be_served_is_logged_and_counted(two: Bundles, tmp_path: Path) -> None:
    first, second = two.paths.values()
    name = next(iter(two.paths))
    served = tmp_path / "current"
    served.symlink_to(first)
    damaged = shutil.copytree(second, tmp_path / "damaged")
    flip_bit(damaged / "weights" / "table.npy", -1)
    narrow = make_bundle(tmp_path / "narrow", seed=3, columns=1)
    with serving(tmp_path, "--bundle", str(served), *PATIENT) as server:

        def failures() -> float:
            return server.metric("inference_bundle_reload_failures_total")

        loop = tmp_path / "loop"
        loop.symlink_to(loop)
        for target, message in (
            (damaged, "table.npy: not the file that was written"),
            (tmp_path / "nowhere", "current: no bundle"),
            (narrow, "its columns differ from the served bundle's"),
            (loop, "current: no bundle"),
        ):
            before = failures()
            _switch(served, target)
            until(lambda message=message: message in server.stderr.read_text())
            until(lambda before=before: failures() > before)
            log = server.stderr.read_text()
            assert f"still serving bundle {name}: {tmp_path}" in log
            _, answer, headers = server.ask("/predict", {"rows": two.rows[:2]})
            assert headers["X-Bundle"] == name
            got = json.loads(answer)["probabilities"]
            np.testing.assert_allclose(got, two.expected[name][:2], atol=ROUNDING)
        before = failures()
        server.process.send_signal(signal.SIGHUP)  # tries it again
        until(lambda: failures() > before)
        assert len(_tables(server.pid)) == 1
        assert _reloads(server) == 0
        _switch(served, first)  # the same as before: nothing to do
        _switch(served, second)
        until(lambda: _reloads(server) == 1)


def test_a_bundle_that_was_repaired_is_tried_again(
    two: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stamp is that of before: ``bundle.json`` was whole."""
    monkeypatch.setattr(reload, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(reload, "_RETRY_S", 0.02)
    first, second = two.paths.values()
    repaired = shutil.copytree(second, tmp_path / "second")
    bias = repaired / "weights" / "module.top.0.bias.npy"
    whole = bias.read_bytes()
    bias.write_bytes(whole[:-1])
    served = tmp_path / "current"
    served.symlink_to(first)

    source = SimpleNamespace(bundle=served, load=lambda bundle: Predictor.load(bundle, check=True))
    failures: list[None] = []
    switches: list[Served] = []
    follower = reload.Reloader(
        source, open_served(source), switches.append, lambda: failures.append(None)
    )
    try:
        _switch(served, repaired)
        until(lambda: len(failures) > 2)
        bias.write_bytes(whole)
        until(lambda: [served.name for served in switches] == list(two.paths)[1:])
    finally:
        follower.close()


def test_each_worker_switches_and_no_request_is_lost(two: Bundles, tmp_path: Path) -> None:
    served = tmp_path / "current"
    names = list(two.paths)
    served.symlink_to(two.paths[names[0]])
    flags = ["--workers", "2", "--drain_s", "1000", *PATIENT]
    with serving(tmp_path, "--bundle", str(served), *flags) as server:
        assert _info(server) == {names[0]: 2.0}
        with asking_for(two, server, []) as wrong:
            for number, name in enumerate(names[::-1], 1):
                _switch(served, two.paths[name])
                server.process.send_signal(signal.SIGHUP)
                until(lambda number=number: _reloads(server) == 2 * number)
                until(lambda name=name: _info(server) == {name: 2.0})
        assert wrong == []
        assert_no_request_is_lost(server)
