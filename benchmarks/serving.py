"""Compare requests of one row over HTTP with FastAPI and ONNX Runtime: CPU time and memory.

Both servers are separate processes. They answer the same bodies in alternate rounds, over one
connection per client, and their probabilities must agree. CPU time is measured because latency also
depends on the other load of the machine. The peer is :mod:`.serving_peer`, in a separate
environment.
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
#: The number of requests in a round.
REQUESTS = 400
#: The number of workers when the memory of workers is measured.
_WORKERS = 2
#: The seconds without an answer after which the benchmark fails.
_TIMEOUT_S = 60.0
_TOLERANCE = 1e-5
_HEAD = "POST /predict HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"


class MeasuredServer:
    """A server that is measured.

    Attributes:
        cpu_ms: The CPU milliseconds per request, for each round.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = psutil.Process(process.pid)
        self._port = port
        self.cpu_ms: list[float] = []

    @property
    def memory_mb(self) -> tuple[float, float]:
        """Its resident memory in MB, and the part that it does not share."""
        return _read_memory(self._process)

    @property
    def worker_memory_mb(self) -> tuple[float, float]:
        """The memory, as :attr:`memory_mb`, of the worker with the largest unshared part."""
        workers = map(_read_memory, self._process.children())
        return max(workers, key=lambda memory: memory[1])

    def measure(self, requests: Sequence[bytes], number: int) -> None:
        """Send ``number`` requests, and record the CPU time per request."""
        before = self._read_cpu_seconds()
        sent = len(self.ask(requests, number))
        self.cpu_ms.append((self._read_cpu_seconds() - before) / sent * 1e3)

    def _read_cpu_seconds(self) -> float:
        # The CPU clock of another process on Linux, whose id is computed as clock_getcpuclockid
        # does. It is exact, while /proc counts ticks of 10 ms, the time of several requests.
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def ask(self, requests: Sequence[bytes], number: int) -> list[tuple[int, float]]:
        """Send requests over all connections; return (index of the request, probability) pairs."""
        answers: list[tuple[int, float]] = []
        errors: list[Exception] = []

        def send(client: int) -> None:
            try:
                address = "127.0.0.1", self._port
                with socket.create_connection(address, _TIMEOUT_S) as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    with connection.makefile("rb") as stream:
                        for turn in range(client, number, CLIENTS):
                            index = turn % len(requests)
                            connection.sendall(requests[index])
                            answers.append((index, _read_answer(stream)))
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
    """Return resident memory in MB, and the part that is not shared with other processes."""
    memory = process.memory_full_info()
    return memory.rss / 1e6, memory.uss / 1e6


def _read_answer(stream: Any) -> float:
    """Read an answer; return the probability of its only row, of the first label if several.

    Raises:
        ClickLogError: The server closed the connection, or answered with an error.
    """
    status = line = stream.readline()
    length = 0
    while line.strip():
        line = stream.readline()
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if not line:  # complete headers would end with an empty line
        raise ClickLogError("a server closed a connection without an answer", "see its log")
    body = stream.read(length)
    if b" 200 " not in status:
        raise ClickLogError(f"a server answered {status!r}: {body!r:.200}", "see its log")
    probabilities = json.loads(body)["probabilities"]
    if isinstance(probabilities, dict):  # by label
        probabilities = next(iter(probabilities.values()))
    return probabilities[0]


@contextlib.contextmanager
def start_server(command: Sequence[Any]) -> Iterator[MeasuredServer]:
    """Start a server, whose first line ends with its port; kill it afterwards."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise ClickLogError(f"{command[0]}: the server did not start", "see its log above")
        yield MeasuredServer(process, int(line.rsplit(":", 1)[1]))
    finally:
        process.kill()
        process.wait()


def add_events(predictor: Predictor, row: dict[str, Any]) -> dict[str, Any]:
    """Add aggregates and histories to a row, because an exported model has no events.

    Each aggregate is 1, and each history repeats the row's own value five times.
    """
    events: dict[str, Any] = {column.name: 1.0 for column in predictor.spec.aggregates}
    for name in predictor.workflow.optional:
        events[name] = [row[name.partition(".")[2]]] * 5
    return row | events


def make_requests(predictor: Predictor, rows: Sequence[dict[str, Any]]) -> list[bytes]:
    """Make a request for each row, with its aggregates and histories."""
    requests = []
    for row in rows:
        body = json.dumps({"rows": [add_events(predictor, row)]}).encode()
        requests.append(f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return requests


def print_requests(
    predictor: Predictor, bundle: Path, onnx: Path, rows: Sequence[dict[str, Any]]
) -> None:
    """Measure both servers; print the CPU time of a request, the ratio, and the memory.

    Args:
        predictor: The predictor of the bundle.
        bundle: The bundle, which our server serves.
        onnx: The exported file of the same model, which the peer serves.
        rows: The rows to score, one in each request.
    """
    build_environment("fastapi")
    requests = make_requests(predictor, rows)
    ours_command = [sys.executable, "-m", "inference", "serve", "--bundle", bundle, "--port", 0]
    peer_command = [find_python("fastapi"), Path(__file__).with_name("serving_peer.py"), onnx]
    with start_server(ours_command) as ours, start_server(peer_command) as peer:
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
    with start_server([*ours_command, "--workers", _WORKERS]) as ours:
        ours.ask(requests, REQUESTS)
        name = f"ours, each of {_WORKERS} workers"
        resident, own = ours.worker_memory_mb
        print(f"{name:36}{'':10}{resident:10.0f}{own:10.0f}")
    print(f"ours takes {statistics.median(ratios):.2f} times the CPU time")
