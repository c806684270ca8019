"""A request of one row over HTTP, beside FastAPI with ONNX Runtime: CPU time, and memory.

Both servers are processes of their own and answer the same bodies, in rounds by turns, over as many
connections as there are clients; their probabilities must agree. CPU time is counted, as the time
until an answer is that of the machine's other load as well. The peer is :mod:`.serving_peer`, in an
environment of its own.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.etl.systems import build_environment, find_python
from benchmarks.process import ROOT
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.inference.predictor import Predictor

CLIENTS = 8
ROUNDS = 7
#: Requests in a round.
REQUESTS = 400
#: Workers of the server whose processes' memory is measured.
_WORKERS = 2
#: Seconds without an answer after which a server is given up.
_TIMEOUT_S = 60.0
_TOLERANCE = 1e-5
_HEAD = "POST /predict HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"


class Served:
    """A server that is measured.

    Attributes:
        cpu_ms: CPU milliseconds of a request, by round.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = psutil.Process(process.pid)
        self._port = port
        self.cpu_ms: list[float] = []

    @property
    def memory_mb(self) -> tuple[float, float]:
        """Its resident memory in MB, and what of it no other process shares."""
        return _read_memory(self._process)

    @property
    def worker_memory_mb(self) -> tuple[float, float]:
        """The memory, as :attr:`memory_mb`, of the worker that has the most of its own."""
        workers = map(_read_memory, self._process.children())
        return max(workers, key=lambda memory: memory[1])

    def measure(self, requests: Sequence[bytes], number: int) -> None:
        """Send so many requests, and note the CPU time of one."""
        before = self._cpu_seconds()
        sent = len(self.ask(requests, number))
        self.cpu_ms.append((self._cpu_seconds() - before) / sent * 1e3)

    def _cpu_seconds(self) -> float:
        # The clock of another process, as clock_getcpuclockid names it on Linux. It is exact, while
        # /proc counts ticks of 10 ms, which are several requests.
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def ask(self, requests: Sequence[bytes], number: int) -> list[tuple[int, float]]:
        """Send requests over all connections; return the index of each, and its probability."""
        answers: list[tuple[int, float]] = []
        errors: list[Exception] = []

        def send(client: int) -> None:
            try:
                address = "127.0.0.1", self._port
                with socket.create_connection(address, _TIMEOUT_S) as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    with connection.makefile("rb") as answered:
                        for turn in range(client, number, CLIENTS):
                            connection.sendall(requests[turn % len(requests)])
                            answers.append((turn % len(requests), _read_answer(answered)))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=send, args=(client,)) for client in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return answers


def _read_memory(process: psutil.Process) -> tuple[float, float]:
    """Return resident memory in MB, and what of it no other process shares."""
    memory = process.memory_full_info()
    return memory.rss / 1e6, memory.uss / 1e6


def _read_answer(answered: Any) -> float:
    """Return the probability of an answer's only row, that of the first label if there are several.

    Raises:
        ClickLogError: There is no answer, or one with another status than 200.
    """
    status = line = answered.readline()
    length = 0
    while line.strip():
        line = answered.readline()
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if not line:  # the headers end with an empty line, not with the connection
        raise ClickLogError("a server closed a connection without an answer", "see its log")
    body = answered.read(length)
    if b" 200 " not in status:
        raise ClickLogError(f"answered {status!r}: {body!r:.200}", "see the server's log")
    probabilities = json.loads(body)["probabilities"]
    if isinstance(probabilities, dict):  # by label
        probabilities = next(iter(probabilities.values()))
    return probabilities[0]


@contextlib.contextmanager
def start(command: Sequence[Any]) -> Iterator[Served]:
    """Start a server, whose first line ends with its port; end it afterwards."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise ClickLogError(f"{command[0]}: the server did not start", "see its log above")
        yield Served(process, int(line.rsplit(":", 1)[1]))
    finally:
        process.kill()
        process.wait()


def add_events(predictor: Predictor, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with what happened before it, of which an exported model knows nothing.

    Each aggregate is 1, and each history is five times the row's own value.
    """
    given: dict[str, Any] = {column.name: 1.0 for column in predictor.spec.aggregates}
    for name in predictor.workflow.optional:
        given[name] = [row[name.partition(".")[2]]] * 5
    return row | given


def make_requests(predictor: Predictor, rows: Sequence[dict[str, Any]]) -> list[bytes]:
    """Return a request for each row, with its events."""
    requests = []
    for row in rows:
        body = json.dumps({"rows": [add_events(predictor, row)]}).encode()
        requests.append(f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return requests


def print_requests(
    predictor: Predictor, bundle: Path, onnx: Path, rows: Sequence[dict[str, Any]]
) -> None:
    """Measure both servers, and print the CPU time of a request, its ratio, and the memory.

    Args:
        predictor: The model of the bundle.
        bundle: What ours serves.
        onnx: The same model as exported, which the peer serves.
        rows: The rows to ask for, one in a request.
    """
    build_environment("fastapi")
    requests = make_requests(predictor, rows)
    ours_command = [sys.executable, "-m", "inference", "serve", "--bundle", bundle, "--port", 0]
    peer_command = [find_python("fastapi"), Path(__file__).with_name("serving_peer.py"), onnx]
    with start(ours_command) as ours, start(peer_command) as peer:
        expected = dict(peer.ask(requests, len(requests)))
        for request, probability in ours.ask(requests, len(requests)):
            np.testing.assert_allclose(probability, expected[request], atol=_TOLERANCE)
        for _ in range(ROUNDS):
            for server in (ours, peer):
                server.measure(requests, REQUESTS)
        ratios = [a / b for a, b in zip(ours.cpu_ms, peer.cpu_ms, strict=True)]
        title = f"a request of one row, {CLIENTS} clients"
        print(f"\n{title:36}{'CPU ms':>10}{'RSS MB':>10}{'own MB':>10}")
        for name, server in (("ours", ours), ("FastAPI and ONNX Runtime", peer)):
            resident, own = server.memory_mb
            print(f"{name:36}{statistics.median(server.cpu_ms):10.3f}{resident:10.0f}{own:10.0f}")
    with start([*ours_command, "--workers", _WORKERS]) as ours:
        ours.ask(requests, REQUESTS)
        name = f"ours, each of {_WORKERS} workers"
        resident, own = ours.worker_memory_mb
        print(f"{name:36}{'':10}{resident:10.0f}{own:10.0f}")
    print(f"ours takes {statistics.median(ratios):.2f} times the CPU time")
