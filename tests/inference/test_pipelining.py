"""Requests that do not wait for the answer to the one before: in this process."""

from __future__ import annotations

import asyncio

import uvicorn
from nvt_torchrec.inference.server.connections import MAX_QUEUED, Connection, Connections
from uvicorn.server import ServerState

from nvt_torchrec.inference.server.metrics import ServerMetrics
from nvt_torchrec.inference.server.settings import ServerSettings

GET = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"POST /half HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"


class Transport(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self, peer: tuple[str, int] | None = ("192.0.2.1", 1)) -> None:
        super().__init__({"peername": peer})
        self.written, self.reading, self.closing = b"", True, False

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0


class Box:
    """A connection to an application that reads a request and then waits to be let go on."""

    def __init__(self, **settings) -> None:
        self.paths: list[str] = []
        self.headers: list[list] = []
        self.go = asyncio.Semaphore(0)
        self.wait_for_body = True
        some = ServerSettings(**settings)
        self.all = Connections(some, ServerMetrics([]), 10)
        self.config = uvicorn.Config(
            self._app, interface="asgi3", log_config=None, access_log=False
        )
        self.connection, self.transport = self.connect(Transport())

    def connect(self, transport: Transport) -> tuple[Connection, Transport]:
        connection = Connection(self.config, ServerState(), {}, connections=self.all)
        connection.connection_made(transport)
        return connection, transport

    async def _app(self, scope, receive, send) -> None:
        self.paths.append(scope["path"])
        while self.wait_for_body and (await receive()).get("more_body"):
            pass
        self.headers.append(scope["headers"])
        await self.go.acquire()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_nothing_is_read_while_requests_are_queued() -> None:
    async def check() -> None:
        box = Box()
        box.connection.data_received(b"".join(GET % i for i in range(3)))
        for answered in range(3):
            await settle()
            assert box.paths == [f"/{i}" for i in range(answered + 1)]
            assert box.transport.reading == (answered == 2)
            box.go.release()
        await settle()
        assert box.transport.written.count(b"HTTP/1.1 204 ") == 3
        assert box.transport.reading

    asyncio.run(check())


def test_many_queued_requests_end_their_connection() -> None:
    async def check() -> None:
        box = Box()
        box.connection.data_received(b"".join(GET % i for i in range(MAX_QUEUED + 1)))
        assert not box.transport.closing
        box.connection.data_received(GET % 99)
        assert box.transport.closing
        running = box.connection._running
        box.connection.connection_lost(None)
        assert running.disconnected  # so that nobody works for it
        assert not box.connection.pipeline

    asyncio.run(check())


def test_a_body_after_its_answer_is_discarded_up_to_a_limit() -> None:
    async def check() -> None:
        box = Box(max_body_mb=1)
        box.wait_for_body = False
        box.go.release()
        box.connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n{")
        await settle()
        assert b"HTTP/1.1 204 " in box.transport.written
        for _ in range(10):
            box.connection.data_received(bytes(100_000))
        assert box.transport.reading
        assert not box.transport.closing
        assert box.connection.state(0)[0] == "idle"  # so it may also not take longer than --idle_s
        box.connection.data_received(bytes(100_000))
        assert box.transport.closing
        assert b"HTTP/1.1 413 " in box.transport.written

    asyncio.run(check())


def test_a_connection_is_busy_with_the_first_of_two_requests() -> None:
    async def check() -> None:
        box = Box()
        box.connection.data_received(GET % 0)
        await settle()
        assert box.connection.busy
        box.connection.data_received(HALF)
        assert box.connection.busy
        box.all.drain()
        box.go.release()
        await settle()
        assert b"connection: close" in box.transport.written  # the half one is not waited for
        assert box.transport.closing

    asyncio.run(check())


def test_draining_answers_all_that_arrived() -> None:
    async def check() -> None:
        box = Box()
        box.connection.data_received(GET % 0 + GET % 1)
        await settle()
        box.all.drain()
        for _ in range(2):
            box.go.release()
        await settle()
        assert box.transport.written.count(b"HTTP/1.1 204 ") == 2
        assert box.transport.written.count(b"connection: close") == 1
        assert box.transport.closing

    asyncio.run(check())


def test_trailers_are_no_headers() -> None:
    async def check() -> None:
        box = Box()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        box.connection.data_received(head + b"0\r\nX-API-Key: 1\r\nHost: y\r\n\r\n")
        await settle()
        assert box.headers == [[(b"host", b"x"), (b"transfer-encoding", b"chunked")]]

    asyncio.run(check())


def test_connections_without_an_address() -> None:
    """As those are that have ended before they were accepted."""

    async def check() -> None:
        box = Box(max_client_connections=1, trusted_proxies="127.0.0.0/8")
        first, _ = box.connect(Transport(None))
        box.connect(Transport(None))
        assert box.all.count == 2
        assert first.transport.closing

    asyncio.run(check())
