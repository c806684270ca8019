"""Connections: how many, how large a head they may send, how long they may take, how they end.

Uvicorn's protocol with limits. A connection is *busy* while a request that has arrived as a whole
is not answered yet; only others are closed to make room.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Sized
from typing import Any

from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from inference.server.answers import RefusedError
from inference.server.fairness import client_of
from inference.server.metrics import ServerMetrics
from inference.server.settings import ServerSettings

log = logging.getLogger(__name__)

#: Of a request's line and headers.
MAX_HEAD_BYTES = 32 << 10
#: Requests of one connection that wait for the one before (pipelining).
MAX_QUEUED = 8


class HeadTooLargeError(Exception):
    """Ends the parsing of a request."""


class TooManyQueuedError(Exception):
    """Ends a connection that does not wait for answers."""


class _Flow(FlowControl):
    """Reads nothing as long as requests are queued, whoever asks for more."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """As uvicorn has it."""
        if not self._pipeline:
            super().resume_reading()


class Connections:
    """All connections of a server.

    Args:
        settings: the limits.
        metrics: where it is counted why connections were ended.
        limit: how many there may be.
    """

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics, limit: int) -> None:
        self._settings, self._metrics = settings, metrics
        self._limit = limit
        self._client_limit = max(1, min(settings.max_client_connections, limit // 2))
        #: by client, those first that have waited longest for a request
        self._clients: dict[str, dict[Connection, None]] = {}
        self.count = 0
        self.draining = False

    def opened(self, connection: Connection) -> None:
        """Take a new connection in; where there are too many, end an idle one, or this one."""
        own = self._clients.setdefault(connection.client_name, {})
        own[connection] = None
        self.count += 1
        if len(own) > self._client_limit and not self._is_proxy(connection):
            crowd = own
        elif self.count > self._limit:
            crowd = max(self._clients.values(), key=len)
        else:
            return
        victim = next((one for one in crowd if not one.busy and one is not connection), None)
        if victim is None:
            connection.refuse(RefusedError(503, "too many connections", remedy="try again later"))
        self._end(victim or connection, "too many")

    def used(self, connection: Connection) -> None:
        """Remember that a request came."""
        own = self._clients.get(connection.client_name, {})
        if connection in own:
            own[connection] = own.pop(connection)

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        own = self._clients.get(connection.client_name, {})
        if connection in own:
            del own[connection]
            self.count -= 1
            if not own:
                del self._clients[connection.client_name]

    def drain(self) -> None:
        """From now on, every answer is the last one of its connection."""
        self.draining = True
        for own in self._clients.values():
            for connection in own:
                connection.drain()

    def sweep(self, now: float) -> None:
        """End those that have taken too long for what they are at. Called every second."""
        limits = {
            "idle": self._settings.idle_s,
            "slow head": self._settings.timeout_s,
            "slow reader": self._settings.timeout_s,
        }
        for connection in [one for own in self._clients.values() for one in own]:
            state, since = connection.state(now)
            if now - since > limits.get(state, float("inf")):
                if state == "slow head":
                    connection.refuse(RefusedError(408, f"no whole head in {limits[state]:g} s"))
                self._end(connection, state)

    def _is_proxy(self, connection: Connection) -> bool:
        proxies = self._settings.proxies
        return bool(proxies and connection.client) and any(
            ipaddress.ip_address(connection.client[0]) in network for network in proxies
        )

    def _end(self, connection: Connection, reason: str) -> None:
        self._metrics.connections_ended.labels(reason).inc()
        if reason != "idle":
            log.warning("a connection of %s was ended: %s", connection.client_name, reason)
        connection.transport.abort()  # what was written is with the kernel, or is not being read
        self.closed(connection)  # now: many may be accepted before the loop says so


class Connection(HttpToolsProtocol):
    """One connection, with limits."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all = connections
        self._running: RequestResponseCycle | None = None  # self.cycle is the newest one
        self.client_name = ""
        self._head_begun = False
        self._head_bytes = 0
        self._requests = 0
        self._events = 0  # of the parser
        self._unparsed = 0  # bytes since the last of them
        self._state = ("", 0)
        self._since = 0.0

    @property
    def busy(self) -> bool:
        """Whether a request that has arrived is not answered yet, by the server's doing."""
        cycle = self._running
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        return not self.flow.write_paused

    def state(self, now: float) -> tuple[str, float]:
        """What it is at, and since when; to the second, as far as it is asked every second."""
        if self.transport.is_closing() or self.flow.write_paused:
            at = ("slow reader", self.transport.get_write_buffer_size())
        elif self._running is not None and not self._running.response_complete:
            at = ("busy", self._requests)
        else:
            at = ("slow head" if self._head_begun else "idle", self._requests)
        if at != self._state:
            self._state, self._since = at, now
        return at[0], self._since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self.client_name = client_of(self.client[0]) if self.client else ""
        self._all.opened(self)
        self.state(time.monotonic())

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        self._all.closed(self)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As asyncio has it; a head, or what else makes no sense, is read up to the limit."""
        events = self._events
        super().data_received(data)
        if self._events != events:
            self._unparsed = 0
            return
        self._unparsed += len(data)
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._head_bytes = self._unparsed
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser refused."""
        if self._head_bytes > MAX_HEAD_BYTES:
            error = RefusedError(431, f"headers of more than {MAX_HEAD_BYTES} bytes")
        else:
            error = RefusedError(400, "no HTTP request")
        self.refuse(error)
        self.transport.close()

    def refuse(self, error: RefusedError) -> None:
        """Send an answer where none is under way; the connection is to be ended."""
        if self.transport.is_closing() or not (self.cycle is None or self.cycle.response_complete):
            return
        headers, body = error.content()
        headers = [*self.server_state.default_headers, *headers, (b"connection", b"close")]
        lines = b"".join(b"%s: %s\r\n" % header for header in dict(headers).items())
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)

    def drain(self) -> None:
        """Make the answer that is to come the last one."""
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
        """As uvicorn has it; the last request that was queued has been begun."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        """As httptools has it; likewise below."""
        self._events += 1
        self._requests += 1
        self._head_begun, self._head_bytes = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count it."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count it. Those after a body (trailers) are no headers: nothing may depend on them."""
        self._count(len(name) + len(value) + 4)
        if self._head_begun:
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._events += 1
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLargeError

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._events += 1
        if len(self.pipeline) >= MAX_QUEUED:
            raise TooManyQueuedError
        self._head_begun = False
        super().on_headers_complete()
        self._all.used(self)
        if self._all.draining:
            self.drain()

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        self._events += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        self._events += 1
        super().on_message_complete()
