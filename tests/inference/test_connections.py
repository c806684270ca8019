"""What a server takes from clients that send too much, too slowly or nothing; see also
``python -m benchmarks.serve.attacks``."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from pathlib import Path

import pytest
from nvt_torchrec.inference.server.logs import RateLimit

from tests.inference.serving import Server, serving
from tests.inference.test_predictor import criteo_dicts
from tests.logs import random_rows

ATTACKER, OTHER_ATTACKER = "127.0.0.2", "127.0.0.3"
HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
FILES = 128


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory):
    flags = "--timeout_s 3 --idle_s 3 --max_client_connections 24 --max_requests 3"
    directory = tmp_path_factory.mktemp("limited")
    with serving(directory, "--bundle", str(bundle), *flags.split(), files=FILES) as started:
        yield started


def _read(connection: socket.socket) -> bytes:
    """All there is until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def _send(connection: socket.socket, piece: bytes, count: int) -> int:
    """Send a piece again and again; how many bytes that were until the connection ended."""
    sent = 0
    with contextlib.suppress(OSError):
        for _ in range(count):
            connection.sendall(piece)
            sent += len(piece)
    return sent


@pytest.mark.parametrize(
    "start",
    [
        HEAD,  # many headers
        HEAD + b"a: ",  # one header
        b"GET /",  # an address
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",  # trailers
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;",  # an extension of a chunk
    ],
)
def test_a_head_without_end_is_not_read(server: Server, start: bytes) -> None:
    piece = b"a: b\r\n" * 20_000 if start.endswith(b"\n") else b"a" * 120_000
    with server.open(ATTACKER) as connection:
        connection.sendall(start)
        sent = _send(connection, piece, 300)  # 36 MB
        _read(connection)
    assert sent < 12e6  # what fits into the sockets' buffers


def test_a_large_head_is_refused(server: Server) -> None:
    small = b"a: b\r\n" * 1000
    with server.open() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + small + b"Connection: close\r\n\r\n")
        assert _read(connection).startswith(b"HTTP/1.1 200 ")
    with server.open() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + 8 * small)
        answer = _read(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in answer
    assert b"headers of more than 32768 bytes" in answer
    with server.open() as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert _read(connection).startswith(b"HTTP/1.1 400 ")
    assert server.metric('inference_connections_ended_total{reason="large head"}') >= 1
    assert server.metric('inference_connections_ended_total{reason="bad request"}') >= 1


def test_idle_and_slow_connections_end(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        idle, head, blank, used, again = (stack.enter_context(server.open()) for _ in range(5))
        head.sendall(HEAD)
        for connection in (used, again):
            connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += connection.recv(1 << 16)
        again.sendall(b"\r\n")  # an empty line before a request is allowed, and is no request
        blank.sendall(b"\r\n")
        assert [_read(connection) for connection in (idle, blank, used, again)] == [b""] * 4
        assert _read(head).startswith(b"HTTP/1.1 408 ")
    assert server.metric('inference_connections_ended_total{reason="slow head"}') >= 1
    assert server.metric('inference_connections_ended_total{reason="idle"}') >= 4


@pytest.mark.parametrize("shrink", [False, True])
def test_connections_of_clients_that_do_not_read_end(server: Server, shrink: bool) -> None:
    """A receive buffer made smaller while it is in use may stall TCP in both directions: then the
    server has nothing to read and nothing left to write, and the connection is idle."""
    reasons = ("slow reader", "idle") if shrink else ("slow reader",)
    names = [f'inference_connections_ended_total{{reason="{reason}"}}' for reason in reasons]
    before = sum(map(server.metric, names))
    # with a body, so that few are read at once: connections with many queued requests are ended
    request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    request += bytes(100_000)
    with socket.socket() as connection:
        if not shrink:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.bind((ATTACKER, 0))
        connection.connect(("127.0.0.1", server.port))
        if shrink:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sending = threading.Thread(target=_send, args=(connection, request, 3000))
        sending.start()
        while sum(map(server.metric, names)) == before:
            assert server.process.poll() is None
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # ends the thread, which may wait to send
        sending.join()


def test_idle_connections_make_room(server: Server) -> None:
    """Four times as many as there may be open files."""
    with contextlib.ExitStack() as stack:
        for source in (ATTACKER, OTHER_ATTACKER) * 2:
            for _ in range(FILES):
                stack.enter_context(server.open(source))
            for _ in range(3):
                assert server.ask("/health")[0] == 200
        assert server.metric("inference_connections") <= FILES - 64
        assert server.metric('inference_connections_ended_total{reason="too many"}') > 3 * FILES
    assert server.stderr.stat().st_size < 5_000


def test_half_bodies_take_no_place(server: Server) -> None:
    """More of them than there may be requests."""
    rows = criteo_dicts(random_rows(1, 1))
    body = json.dumps({"rows": rows}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(server.open(ATTACKER))
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
        for _ in range(5):  # announced, and never sent
            connection = stack.enter_context(server.open(OTHER_ATTACKER))
            connection.sendall(HEAD + b"Content-Length: 8000000\r\n\r\n{")
        assert [len(server.predict(rows=rows)) for _ in range(5)] == [1] * 5
        server.wait_for("inference_requests_under_way", 0)
        connection = stack.enter_context(server.open(ATTACKER))
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
        connection.sendall(body[-1:])
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_logs_do_not_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("nvt_torchrec.inference.server.logs.time.monotonic", lambda: now[0])
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    handler.addFilter(RateLimit())
    log = logging.Logger("test")
    log.addHandler(handler)
    for i in range(1000):
        log.warning("client %s: slow", i)
        log.warning(f"socket {i:#x}")
    log.error("client %s: slow", 1)
    assert lines == ["client 0: slow", "socket 0x0", "client 1: slow"]
    now[0] = 10.0
    log.warning("client %s: slow", 7)
    log.warning("client %s: slow", 8)
    assert lines[3:] == ["client 7: slow (and 999 more like it)"]
