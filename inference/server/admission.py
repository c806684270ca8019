"""What is let in: how many requests, how large, for how long. The outermost layer, plain ASGI.

Under overload most of the work is saying no, so that is done here, before JSON is looked at.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from inference.server.metrics import ServerMetrics
from inference.server.settings import ServerSettings

PREDICT = "/predict"
#: Largest bodies that may be under way at once, bounding the memory of a server.
_LARGE_BODIES = 8
_RETRY_AFTER = (b"retry-after", b"1")


class RefusedError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        details: the answer, JSON-ready.
    """

    def __init__(self, status: int, error: str, **details: Any) -> None:
        super().__init__(error)
        self.status, self.details = status, {"error": error, **details}


def too_busy() -> RefusedError:
    """503."""
    return RefusedError(503, "too many requests are waiting", remedy="try again later")


class Pace:
    """How fast requests get done, and so how long a new one would wait.

    Work is measured in bytes of bodies: they are known at once, and reading them is a good part of
    the work. Times are seconds of any clock.
    """

    _LEAST_BUSY = 0.25

    def __init__(self) -> None:
        self._waiting = self._done = 0
        self._busy = self._since = 0.0
        self._rate = 0.0

    @property
    def wait(self) -> float:
        """Seconds until what was begun is done; 0 as long as nothing is known."""
        return self._waiting / self._rate if self._rate else 0.0

    def begin(self, size: int, now: float) -> None:
        """A request with so many bytes has been accepted."""
        if not self._waiting:
            self._since = now
        self._waiting += size

    def end(self, size: int, now: float, *, done: bool) -> None:
        """It is over; ``done``: its work was."""
        self._waiting -= size
        self._busy += now - self._since
        self._since = now
        self._done += size * done
        if self._busy >= self._LEAST_BUSY and self._done:
            rate = self._done / self._busy
            self._rate = (self._rate + rate) / 2 if self._rate else rate
            self._busy = self._done = 0


class Admission:
    """Lets requests for :data:`PREDICT` through to ``app`` within the limits; others always.

    Args:
        app: the application; gets bodies that have been read already.
        settings: the limits.
        metrics: where requests are counted.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self.requests = 0
        self._bytes = 0
        self._pace = Pace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http" or scope["path"] != PREDICT or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        if self.requests >= self._settings.max_requests:
            await answer.refuse(too_busy())
            self._metrics.requests.labels(answer.status).inc()
            return
        begin = time.perf_counter()
        self.requests += 1
        body = _Body()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._read(scope, receive, body)
                if self._pace.wait > self._settings.max_wait_ms / 1e3:
                    raise too_busy()
                await self._pass_on(scope, _replay(body.data, receive), answer, len(body.data))
        except TimeoutError:
            if body.complete:
                error = RefusedError(503, "not scored in time", remedy="try again later")
            else:
                error = RefusedError(408, f"no whole body in {self._settings.timeout_s:g} s")
            await answer.refuse(error)
        except RefusedError as error:
            await answer.refuse(error)
        finally:
            self.requests -= 1
            self._bytes -= body.counted
            if answer.status:
                self._metrics.requests.labels(answer.status).inc()
                if answer.status != 503:
                    self._metrics.request_seconds.observe(time.perf_counter() - begin)

    async def _pass_on(self, scope: Scope, receive: Receive, answer: _Answer, size: int) -> None:
        self._pace.begin(size, time.perf_counter())
        try:
            # let all that have arrived be counted before any is worked on: where reading requests
            # is the bottleneck, this is where they wait
            await asyncio.sleep(0)
            await self._app(scope, receive, answer)
        finally:
            self._pace.end(size, time.perf_counter(), done=answer.status != 0)

    async def _read(self, scope: Scope, receive: Receive, body: _Body) -> None:
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise RefusedError(
                415, f"content type {kind.decode('latin-1')!r}", remedy="send application/json"
            )
        length = headers.get(b"content-length", b"")
        self._count(body, int(length) if length.isdigit() else 0)
        parts, size = [], 0
        while not body.complete:
            message: MutableMapping[str, Any] = await receive()
            if message["type"] == "http.disconnect":
                raise RefusedError(400, "the body ended early")
            part = message.get("body", b"")
            size += len(part)
            self._count(body, size)
            parts.append(part)
            body.complete = not message.get("more_body", False)
        body.data = b"".join(parts)

    def _count(self, body: _Body, size: int) -> None:
        limit = self._settings.max_body_bytes
        if size > limit:
            raise RefusedError(
                413,
                f"a body of more than {limit} bytes",
                remedy="send fewer rows at once; the server's --max_body_mb bounds it",
            )
        more = max(0, size - body.counted)
        if self._bytes + more > _LARGE_BODIES * limit:
            raise too_busy()
        self._bytes += more
        body.counted += more


class _Body:
    def __init__(self) -> None:
        self.data = b""
        self.complete = False
        self.counted = 0


class _Answer:
    """Passes an answer on, and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def refuse(self, error: RefusedError) -> None:
        if self.status:  # an answer is under way: too late for another
            return
        content = json.dumps(error.details).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
        ]
        if error.status == 503:
            headers.append(_RETRY_AFTER)
        if error.status in (408, 413):  # the rest of the body is not waited for
            headers.append((b"connection", b"close"))
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": content})


def _replay(data: bytes, receive: Receive) -> Receive:
    """A body that was read already, then what the connection says."""
    sent = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    return replay
