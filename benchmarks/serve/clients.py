"""A server in a process of its own, and clients that send requests to it."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from nvt_torchrec.base.errors import SettingsError

_JSON = {"Content-Type": "application/json"}
_PATIENCE_S = 30.0


class Target:
    """A running server.

    Attributes:
        process: The server's process, or the parent process of its workers.
        port: Its port on 127.0.0.1.
    """

    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.process, self.port, self._log = process, port, log

    @property
    def log_bytes(self) -> int:
        """Bytes written to stderr so far."""
        return self._log.stat().st_size

    @property
    def peak_mib(self) -> float:
        """Largest resident memory so far, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    @property
    def open_files(self) -> int:
        """The number of file descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """Connect from an address of this machine."""
        return socket.create_connection(("127.0.0.1", self.port), _PATIENCE_S, (source, 0))

    def health(self, timeout_s: float) -> float | None:
        """Return the seconds until ``GET /health`` is answered; None if it is not."""
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", "/health")
            answered = connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            answered = False
        finally:
            connection.close()
        return time.perf_counter() - begin if answered else None


@contextlib.contextmanager
def serving(repository: Path, bundle: Path, *flags: str, files: int = 0) -> Iterator[Target]:
    """Run the server of a checkout, with a limit of open files if ``files`` is not 0."""

    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    command = [sys.executable, "-m", "inference", "serve", "--bundle", str(bundle), "--port", "0"]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            [*command, *flags],
            cwd=repository,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=limit,
        )
        try:
            url = process.stdout.readline().strip()
            if not url:
                reason = Path(log.name).read_text()
                raise SettingsError(f"{repository}: the server did not start", reason)
            yield Target(process, int(url.rpartition(":")[2]), Path(log.name))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


class Clients:
    """Threads that each send the next request when the last one is answered.

    Attributes:
        answers: Number of answers by status.
        seconds: Seconds that each answer with status 200 took.
        lost: Errors of requests that were sent and not answered.
        ends: Number of connections that ended as announced, or before a request was sent on them.
    """

    def __init__(
        self, target: Target, body: bytes, count: int, source: str, pause_s: float = 0.0
    ) -> None:
        self._target, self._body, self._source, self._pause_s = target, body, source, pause_s
        self.answers: Counter[int] = Counter()
        self.seconds: list[float] = []
        self.lost: list[str] = []
        self.ends = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * _PATIENCE_S)

    def share(self, status: int) -> float:
        """Return the fraction of all requests that were answered with a status."""
        return self.answers[status] / max(1, self.answers.total() + len(self.lost))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                connection = http.client.HTTPConnection(
                    "127.0.0.1", self._target.port, _PATIENCE_S, (self._source, 0)
                )
                connection.connect()
            except OSError:  # no listener: nothing was sent
                if self._target.process.poll() is not None:
                    return
                time.sleep(0.01)
                continue
            with contextlib.closing(connection):
                self._send_requests(connection)
                self.ends += 1

    def _send_requests(self, connection: http.client.HTTPConnection) -> None:
        while not self._stop.is_set():
            begin = time.perf_counter()
            try:
                connection.request("POST", "/predict", self._body, _JSON)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(repr(error))
                return
            self.answers[answer.status] += 1
            if answer.status == 200:
                self.seconds.append(time.perf_counter() - begin)
            if answer.will_close:
                return
            time.sleep(self._pause_s)
