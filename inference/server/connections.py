"""Limits of connections: their number, the size of headers, queued requests, and time.

Uvicorn's protocol, with limits that it does not have: its ``h11_max_incomplete_event_size`` is only
for h11, its ``limit_concurrency`` is the same for all clients and refuses instead of closing idle
connections, and its ``timeout_keep_alive`` is cancelled by any byte and not counted.

A connection is *busy* while a complete request is not answered yet; only connections that are not
busy are closed to make room for new ones.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Sized
from typing import Any, NoReturn

from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from nvt_torchrec.inference.server.answers import RefusedError
from nvt_torchrec.inference.server.fairness import client_of
from nvt_torchrec.inference.server.metrics import ServerMetrics
from nvt_torchrec.inference.server.settings import ServerSettings

log = logging.getLogger(__name__)

#: Largest size of a request's line and headers.
MAX_HEAD_BYTES = 32 << 10
#: Largest number of requests of one connection that wait for earlier ones (pipelining).
MAX_QUEUED = 8
_LARGE_HEAD = "large head", RefusedError(431, f"headers of more than {MAX_HEAD_BYTES} bytes")


class _StopParsingError(Exception):
    """Raised in a callback of the parser to end the connection."""


class _FlowControl(FlowControl):
    """Uvicorn's flow control, which in addition does not read while requests are queued."""

    def __init__(self, transport: asyncio.Transport, queue: Sized) -> None:
        super().__init__(transport)
        self._queue = queue

    def resume_reading(self) -> None:
        """Resume reading unless requests are queued."""
        if not self._queue:
            super().resume_reading()


class Connections:
    """All connections of a server.

    Args:
        settings: The limits.
        metrics: Counts why connections were ended.
        limit: The largest number of open connections.
    """

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics, limit: int) -> None:
        self.settings, self._metrics = settings, metrics
        self._limit = limit
        self._client_limit = max(1, min(settings.max_client_connections, limit // 2))
        #: by client, ordered by the time of the last request, the oldest first
        self._clients: dict[str, dict[Connection, None]] = {}
        self.count = 0
        self.draining = False

    def opened(self, connection: Connection) -> None:
        """Register a connection. If there are too many, end an idle one, or else the new one."""
        own = self._clients.setdefault(connection.client_name, {})
        own[connection] = None
        self.count += 1
        if len(own) > self._client_limit and not self._is_proxy(connection):
            candidates = own
        elif self.count > self._limit:
            candidates = max(self._clients.values(), key=len)
        else:
            return
        victim = next((c for c in candidates if not c.busy and c is not connection), None)
        if victim is None:
            connection.refuse(RefusedError(503, "too many connections", remedy="try again later"))
        self._end(victim or connection, "too many")

    def used(self, connection: Connection) -> None:
        """Record that a request arrived on a connection."""
        own = self._clients.get(connection.client_name, {})
        if connection in own:
            own[connection] = own.pop(connection)

    def closed(self, connection: Connection) -> None:
        """Remove a connection."""
        own = self._clients.get(connection.client_name, {})
        if connection in own:
            del own[connection]
            self.count -= 1
            if not own:
                del self._clients[connection.client_name]

    def drain(self) -> None:
        """Send every answer from now on with ``Connection: close``."""
        self.draining = True
        for own in self._clients.values():
            for connection in own:
                connection.drain()

    def sweep(self, now: float) -> None:
        """End connections that exceed the time limit of their state. Called every second."""
        limits = {
            "idle": self.settings.idle_s,
            "slow head": self.settings.timeout_s,
            "slow reader": self.settings.timeout_s,
        }
        for connection in [c for own in self._clients.values() for c in own]:
            state, since = connection.state(now)
            if now - since > limits.get(state, float("inf")):
                if state == "slow head":
                    connection.refuse(
                        RefusedError(
                            408, f"the headers were not complete within {limits[state]:g} s"
                        )
                    )
                self._end(connection, state)

    def count_end(self, connection: Connection, reason: str) -> None:
        """Count that the server ends a connection, and log it unless it was idle."""
        self._metrics.connections_ended.labels(reason).inc()
        if reason != "idle":
            log.warning("ended a connection of %s: %s", connection.client_name, reason)

    def _is_proxy(self, connection: Connection) -> bool:
        proxies = self.settings.proxies
        return bool(proxies and connection.client) and any(
            ipaddress.ip_address(connection.client[0]) in network for network in proxies
        )

    def _end(self, connection: Connection, reason: str) -> None:
        self.count_end(connection, reason)
        connection.transport.abort()  # the kernel still sends what was written to it
        self.closed(connection)  # now: more may be accepted before connection_lost is called


class Connection(HttpToolsProtocol):
    """One connection, with limits."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all = connections
        self._running: RequestResponseCycle | None = None  # self.cycle is the newest one
        self.client_name = ""
        self._in_head = False
        self._head_bytes = 0
        self._discarded_bytes = 0  # of a body whose request is answered already
        self._requests = 0
        self._unparsed = 0  # bytes since the last callback of the parser
        self._refusal: tuple[str, RefusedError] | None = None  # why parsing was stopped
        self._state = ("", 0)
        self._since = 0.0

    @property
    def busy(self) -> bool:
        """Whether a complete request waits for the server, not for the client."""
        cycle = self._running
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        return not self.flow.write_paused

    def state(self, now: float) -> tuple[str, float]:
        """Return the connection's state, and since when, as seen by calls once a second."""
        if self.transport.is_closing() or self.flow.write_paused:
            state = ("slow reader", self.transport.get_write_buffer_size())
        elif self._running is not None and not self._running.response_complete:
            state = ("busy", self._requests)
        else:
            state = ("slow head" if self._in_head else "idle", self._requests)
        if state != self._state:
            self._state, self._since = state, now
        return state[0], self._since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio."""
        super().connection_made(transport)
        self.flow = _FlowControl(transport, self.pipeline)
        self.client_name = client_of(self.client[0]) if self.client else ""
        self._all.opened(self)
        self.state(time.monotonic())

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._all.closed(self)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: :meth:`Connections.sweep` ends idle connections, and counts them."""

    def data_received(self, data: bytes) -> None:
        """Parse data; refuse more than the limit of it that leads to no callback of the parser."""
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = _LARGE_HEAD
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """End the connection because of what the client sent; answer if no answer is under way."""
        reason, error = self._refusal or ("bad request", RefusedError(400, "not an HTTP request"))
        self.refuse(error)
        self._all.count_end(self, reason)
        self.transport.close()

    def refuse(self, error: RefusedError) -> None:
        """Write an answer if none is under way. The caller ends the connection."""
        if self.transport.is_closing() or not (self.cycle is None or self.cycle.response_complete):
            return
        headers, body = error.content()
        headers = [*self.server_state.default_headers, *headers, (b"connection", b"close")]
        lines = b"".join(b"%s: %s\r\n" % header for header in dict(headers).items())
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)

    def drain(self) -> None:
        """Close the connection after the last request that has arrived is answered."""
        arrived = [
            cycle
            for cycle in (self._running, *(cycle for cycle, _ in reversed(self.pipeline)))
            if cycle is not None and not cycle.response_started and not cycle.more_body
        ]
        last = arrived[-1] if arrived else self.cycle
        if last is not None and not last.response_started:
            last.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Start the next queued request; read on if it was the last one of the queue."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self.flow.resume_reading()

    # Callbacks of httptools' parser

    def on_message_begin(self) -> None:
        """Start to count a head."""
        self._unparsed = 0
        self._requests += 1
        self._in_head, self._head_bytes, self._discarded_bytes = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the URL."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header. Ignore trailers (headers after a body): nothing may depend on them."""
        self._count_head(len(name) + len(value) + 4)
        if self._in_head:
            super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._unparsed = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop(*_LARGE_HEAD)

    def on_headers_complete(self) -> None:
        """Start or queue the request."""
        self._unparsed = 0
        if len(self.pipeline) >= MAX_QUEUED:
            self._stop("pipelining", RefusedError(400, f"more than {MAX_QUEUED} queued requests"))
        self._in_head = False
        super().on_headers_complete()
        self._all.used(self)
        if self._all.draining:
            self.drain()

    def on_body(self, body: bytes) -> None:
        """Pass a part of a body on; discard it, up to a limit, after the answer to its request."""
        self._unparsed = 0
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            limit = self._all.settings.max_body_bytes
            if self._discarded_bytes > limit:
                error = RefusedError(413, f"a body of more than {limit} bytes, after its answer")
                self._stop("unread body", error)
        super().on_body(body)

    def _stop(self, reason: str, error: RefusedError) -> NoReturn:
        self._refusal = reason, error
        raise _StopParsingError(reason)
