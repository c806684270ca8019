"""How a server ends."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.inference.bundles import ROWS
from tests.inference.serving import JSON, Server, serving
from tests.shell import ROOT


def ask_until_the_end(server: Server, body: bytes, threads: int) -> tuple[list[int], list[str]]:
    """SIGTERM under load: statuses of the answers, and requests that were lost.

    Each client keeps its connection until an answer closes it.
    """
    answers: list[int] = []
    lost: list[str] = []
    begun = threading.Semaphore(0)

    def ask() -> None:
        connection, closing = server.connect(), False
        while not closing:
            try:
                connection.request("POST", "/predict", body, JSON)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException) as error:
                lost.append(repr(error))
                break
            answers.append(answer.status)
            closing = answer.will_close
            begun.release()
        connection.close()

    running = [threading.Thread(target=ask) for _ in range(threads)]
    for thread in running:
        thread.start()
    for _ in range(20 * threads):
        assert begun.acquire(timeout=600)
    server.process.send_signal(signal.SIGTERM)
    for thread in running:
        thread.join(600)
    server.process.send_signal(signal.SIGTERM)  # end now
    assert server.ended() == 0
    return answers, lost


def assert_no_request_is_lost(server: Server) -> None:
    """End a server that has ``--drain_s 1000`` under load."""
    answers, lost = ask_until_the_end(server, json.dumps({"rows": ROWS[:1]}).encode(), 16)
    assert lost == []
    assert set(answers) == {200}


def test_no_request_is_lost(small_bundle: Path, tmp_path: Path) -> None:
    """Of two workers: see test_follow.py."""
    flags = ["--timeout_s", "100", "--drain_s", "1000"]
    with serving(tmp_path, "--bundle", str(small_bundle), *flags) as server:
        assert_no_request_is_lost(server)


def test_a_request_under_way_is_answered_without_draining(
    small_bundle: Path, tmp_path: Path
) -> None:
    body = json.dumps({"rows": ROWS}).encode()
    flags = ["--bundle", str(small_bundle), "--timeout_s", "100", "--drain_s", "0"]
    with serving(tmp_path, *flags) as server:
        connection = server.connect()
        connection.putrequest("POST", "/predict")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:-1])
        assert server.ask("/health")[0] == 200  # the server has the request's beginning, too
        server.process.send_signal(signal.SIGTERM)
        while _listens(server):
            time.sleep(0.01)
        connection.send(body[-1:])
        answer = connection.getresponse()
        assert (answer.status, len(json.loads(answer.read())["probabilities"])) == (200, len(ROWS))
        assert server.ended() == 0


def _listens(server: Server) -> bool:
    try:
        server.connect().connect()
    except OSError:
        return False
    return True


def test_draining_is_announced(small_bundle: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "--bundle", str(small_bundle), "--drain_s", "1000") as server:
        connection = server.connect()
        for expected in (None, "close"):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
            assert answer.headers["Connection"] == expected
            if expected is None:
                server.process.send_signal(signal.SIGTERM)
                while server.ask("/ready")[0] == 200:
                    pass
        assert server.ask("/ready")[:2] == (503, b'{"status":"draining"}')
        assert len(server.predict(rows=ROWS[:2])) == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0


@pytest.mark.parametrize(("after_s", "workers"), [(0.0, 2), (1.5, 1)])
def test_ending_before_it_is_ready(small_bundle: Path, after_s: float, workers: int) -> None:
    """Whatever is being imported or read."""
    flags = ["--bundle", str(small_bundle), "--workers", str(workers)]
    command = [sys.executable, "-m", "inference", "serve", "--port", "0", *flags]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        # python itself has to start before anything can be handled
        while not _handles_sigterm(process.pid):
            time.sleep(0.01)
        time.sleep(after_s)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=600)
    assert (process.returncode, stderr) == (0, "")


def _handles_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
