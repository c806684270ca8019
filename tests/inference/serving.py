"""A server in a process of its own, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.shell import ROOT
from tests.warm import process_of, warm_python

JSON = {"Content-Type": "application/json"}


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def asking(
    connect: Callable[[], http.client.HTTPConnection],
    ask: Callable[[http.client.HTTPConnection, np.random.Generator], object],
    count: int = 4,
) -> Iterator[list[str]]:
    """Threads that each call ``ask`` again and again over a connection; yields what went wrong."""
    stop, wrong = threading.Event(), []

    def run(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            with contextlib.closing(connect()) as connection:
                while not stop.is_set():
                    ask(connection, rng)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        for thread in threads:
            thread.join(600)


class Server:
    """A running ``python -m inference serve``."""

    def __init__(self, process: subprocess.Popen, port: int, stderr: Path) -> None:
        self.process, self.port, self.stderr = process, port, stderr
        self.pid = process_of(process.pid)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] = JSON
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """GET, or POST of bytes or of a value as JSON: status, body, headers."""
        with contextlib.closing(self.connect()) as connection:
            if body is None:
                connection.request("GET", path)
            else:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                connection.request("POST", path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers

    def predict(self, **body: Any) -> list[float]:
        status, answer, _ = self.ask("/predict", body)
        assert status == 200, answer
        return json.loads(answer)["probabilities"]

    def refused(self, body: Any, status: int, **headers: str) -> dict[str, Any]:
        """Why a request was."""
        got, answer, _ = self.ask("/predict", body, headers or JSON)
        assert got == status, answer
        assert b"Traceback" not in answer
        return json.loads(answer)

    def metric(self, name: str) -> float:
        text = self.ask("/metrics")[1].decode()
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    def wait_for(self, name: str, value: float) -> None:
        """Until a metric has a value: its process moves on by itself."""
        until(lambda: self.metric(name) == value)

    def memory(self, kind: str) -> float:
        """MiB of its process: resident now ("VmRSS"), or at most so far ("VmHWM")."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(status.partition(f"{kind}:")[2].split()[0]) / 1024

    def ended(self) -> int:
        return self.process.wait(600)


@contextlib.contextmanager
def serving(directory: Path, *flags: str) -> Iterator[Server]:
    """A server on a free port; its stderr goes to a file in ``directory``."""
    stderr = directory / "stderr"
    with open(stderr, "wb") as errors:
        process = subprocess.Popen(
            [warm_python(), "-m", "inference", "serve", "--port", "0", *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        line = process.stdout.readline()
        match = re.fullmatch(r"serving on http://127\.0\.0\.1:(\d+)\n", line)
        assert match, f"{line!r} {stderr.read_text()}"
        yield Server(process, int(match[1]), stderr)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def request_of(tensors: dict[str, np.ndarray]) -> dict:
    """The JSON of a request of the Open Inference Protocol."""
    kinds = {"object": "BYTES", "int64": "INT64", "float64": "FP64", "float32": "FP32"}
    return {
        "inputs": [
            {
                "name": name,
                "shape": list(values.shape),
                "datatype": kinds[values.dtype.name],
                "data": json.loads(json.dumps(values.tolist()).replace("NaN", "null")),
            }
            for name, values in tensors.items()
        ]
    }
