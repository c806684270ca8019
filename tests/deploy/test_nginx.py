"""``deploy/nginx.conf``: a real nginx before a real server, under known attacks.

Meanwhile other clients send requests, all of which must be answered, and with the right scores.
``python -m pytest -s tests/deploy`` prints what docs/security.md shows.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.inference.predictor import Predictor
from tests.inference.bundles import ROWS, make_bundle
from tests.inference.serving import Server, asking, serving
from tests.shell import ROOT, free_port

KEYS = {"good": "0123456789abcdef" * 4, "attacker": "fedcba9876543210" * 4}
SECONDS = 4.0
HEADER_BYTES, SLOW_BODIES, IDLE_SOCKETS, GREEDY_ROWS, GREEDY_CONNECTIONS = (
    60 << 20, 300, 400, 4096, 16
)  # fmt: skip
BODY = json.dumps({"rows": ROWS}).encode()
GREEDY_BODY = json.dumps(
    {"rows": list(itertools.islice(itertools.cycle(ROWS), GREEDY_ROWS))}
).encode()
HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
AUTHORIZED = HEAD + f"Authorization: Bearer {KEYS['attacker']}\r\n".encode()

pytestmark = pytest.mark.skipif(
    not (shutil.which("nginx") and shutil.which("openssl")), reason="needs nginx and openssl"
)


class Proxy:
    """A running nginx, and the server behind it."""

    def __init__(self, port: int, certificate: Path, server: Server) -> None:
        self.port, self.server = port, server
        self.tls = ssl.create_default_context(cafile=certificate)

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=100, context=self.tls)

    def open(self) -> socket.socket:
        """Return a bare connection."""
        plain = socket.create_connection(("127.0.0.1", self.port), 100)
        return self.tls.wrap_socket(plain, server_hostname="127.0.0.1")

    def ask(self, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        with contextlib.closing(self.connect()) as connection:
            headers = {"Content-Type": "application/json"} | headers
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("nginx") / "bundle", seed=1)


@pytest.fixture(scope="module")
def proxy(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("nginx")
    certificate = folder / "chain.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
    command += "-subj /CN=test -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out chain.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    (folder / "api_keys.conf").write_text("".join(f"{key} {name};\n" for name, key in KEYS.items()))
    port = int(free_port())
    with serving(folder, "--bundle", str(bundle), "--timeout_s", "100") as server:
        temporary = "".join(
            f"{name}_temp_path {folder}/{name};"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        places = {
            "user www-data;": "user root;" if os.geteuid() == 0 else "",
            "/run/nginx.pid": f"{folder}/pid",
            "/var/log/nginx/": f"{folder}/",
            "/etc/nginx/api_keys.conf": f"{folder}/api_keys.conf",
            "/etc/nginx/tls/": f"{folder}/",
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "127.0.0.1:8000": f"127.0.0.1:{server.port}",
            "\nhttp {": "\nhttp {" + temporary,
            "proxy_read_timeout 15s": "proxy_read_timeout 100s",  # on a machine with other load
        }
        text = (ROOT / "deploy" / "nginx.conf").read_text()
        for before, after in places.items():
            assert before in text
            text = text.replace(before, after)
        (folder / "nginx.conf").write_text(text)
        nginx = ["nginx", "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
        with subprocess.Popen([*nginx, "-g", "daemon off;"]) as process:
            try:
                while True:
                    with contextlib.suppress(ConnectionRefusedError):
                        socket.create_connection(("127.0.0.1", port), 100).close()
                        break
                    assert process.poll() is None, (folder / "error.log").read_text()
                    time.sleep(0.05)
                started = Proxy(port, certificate, server)
                # What large requests take for good: threads, their heaps, buffers.
                with ThreadPoolExecutor(GREEDY_CONNECTIONS) as pool:
                    headers = {"X-API-Key": KEYS["good"]}
                    asked = [
                        pool.submit(started.ask, "/predict", GREEDY_BODY, **headers)
                        for _ in range(3 * GREEDY_CONNECTIONS)
                    ]
                    assert {each.result()[0] for each in asked} <= {200, 503}
                yield started
            finally:
                process.terminate()


def header_flood(proxy: Proxy, stack: contextlib.ExitStack) -> str:
    """60 MB of headers on one connection."""
    connection, sent = stack.enter_context(proxy.open()), 0
    piece = b"a: b\r\n" * 10_000
    with contextlib.suppress(OSError):
        connection.sendall(AUTHORIZED)
        while sent < HEADER_BYTES:
            connection.sendall(piece)
            sent += len(piece)
    assert set(_statuses([connection])) <= {"400", "none"}
    return "refused (400) after 32 KiB; nginx discarded the rest"


def slow_bodies(proxy: Proxy, stack: contextlib.ExitStack) -> str:
    """300 requests of one client that stop in the middle of their body."""
    half = AUTHORIZED + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[: len(BODY) // 2]
    connections = []
    for _ in range(SLOW_BODIES):
        connections.append(stack.enter_context(proxy.open()))
        connections[-1].sendall(half)
    time.sleep(SECONDS)
    statuses = _statuses(connections)
    assert set(statuses) <= {"429", "none"}  # none: ended, because the body is too slow
    assert proxy.server.metric('inference_requests_total{code="408"}') == 0
    return f"{statuses['429']} refused (429), {statuses['none']} ended; none reached the server"


def idle_sockets(proxy: Proxy, stack: contextlib.ExitStack) -> str:
    """400 connections that send nothing."""
    plain = [
        stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), 100))
        for _ in range(IDLE_SOCKETS)
    ]
    time.sleep(SECONDS)
    assert proxy.ask("/health")[0] == 200
    assert _statuses(plain) == {"none": IDLE_SOCKETS}
    return "ended after 5 s"


def byte_chunks(proxy: Proxy, stack: contextlib.ExitStack) -> str:
    """A complete body, in chunks of one byte, on 20 connections."""
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    connections = [stack.enter_context(proxy.open()) for _ in range(20)]
    for connection in connections:
        connection.sendall(AUTHORIZED + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert _statuses(connections) == {"200": 20}
    return "answered as one body"


def greedy_client(proxy: Proxy, stack: contextlib.ExitStack) -> str:
    """16 connections of one client that send 4,096 rows a request, again and again."""
    statuses: Counter[int] = Counter()
    end = time.monotonic() + SECONDS

    def send() -> None:
        while time.monotonic() < end:
            statuses[
                proxy.ask("/predict", GREEDY_BODY, Authorization=f"Bearer {KEYS['attacker']}")[0]
            ] += 1

    threads = [threading.Thread(target=send) for _ in range(GREEDY_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 429, 503}
    return f"{statuses[200]} of its {statuses.total()} requests answered, others 503 or 429"


def _statuses(connections: list[socket.socket]) -> Counter[str]:
    """Count the statuses of answers; "none" for connections that end without."""
    statuses: Counter[str] = Counter()
    for connection in connections:
        answer = b""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            answer = connection.recv(1 << 16)
        statuses[answer.split()[1].decode() if answer else "none"] += 1
    return statuses


@pytest.mark.parametrize(
    "attack", [header_flood, slow_bodies, idle_sockets, byte_chunks, greedy_client]
)
def test_attacks_harm_no_other_client(proxy: Proxy, bundle: Path, attack) -> None:
    expected = Predictor.load(bundle).predict(ROWS)
    before = proxy.server.memory("VmHWM")
    headers = {"Content-Type": "application/json", "X-API-Key": KEYS["good"]}
    seconds: list[float] = []

    def ask(connection: http.client.HTTPConnection, rng: object) -> None:
        begin = time.perf_counter()
        connection.request("POST", "/predict", BODY, headers)
        scores = json.loads(connection.getresponse().read())["probabilities"]
        np.testing.assert_allclose(scores, expected, atol=1e-6)
        seconds.append(time.perf_counter() - begin)
        time.sleep(0.01)

    with asking(proxy.connect, ask) as wrong, contextlib.ExitStack() as stack:
        effect = attack(proxy, stack)
        enough = len(seconds) + 100
        while len(seconds) < enough and not wrong:
            time.sleep(0.01)
    assert wrong == []
    growth = proxy.server.memory("VmHWM") - before
    assert growth < 32  # of 16 bodies of 0.2 MiB, and the values of two, 2.5 MiB each
    p99 = 1e3 * float(np.quantile(seconds, 0.99))
    print(
        f"\n{attack.__name__}: {effect}; {len(seconds):,} good requests, p99 {p99:.0f} ms; "
        f"server's memory +{growth:.1f} MiB"
    )


def test_keys_and_limits(proxy: Proxy) -> None:
    for wrong in ({}, {"Authorization": f"Basic {KEYS['good']}"}, {"X-API-Key": KEYS["good"][1:]}):
        status, answer = proxy.ask("/predict", BODY, **wrong)
        assert (status, json.loads(answer)["error"]) == (401, "no valid API key")
        assert proxy.ask("/metrics", **wrong)[0] == 401
    for right in ({"Authorization": f"bearer  {KEYS['good']}"}, {"X-API-Key": KEYS["good"]}):
        assert proxy.ask("/predict", BODY, **right)[0] == 200
    assert proxy.ask("/ready")[0] == 200
    statuses = {200}
    with ThreadPoolExecutor(16) as pool:
        while statuses == {200}:  # until they were faster than 10 a second
            statuses |= {status for status, _ in pool.map(proxy.ask, ["/health"] * 200)}
    assert statuses == {200, 429}
    status, answer = proxy.ask("/predict", b" " * (17 << 19), **right)
    assert status == 413
    assert b"--max_body_mb" in answer
    with proxy.open() as slow:
        slow.sendall(HEAD)  # the headers take longer than 5 s
        assert _statuses([slow]) == {"none": 1}
