"""What is let in: how many requests, how large, for how long. Plain ASGI, around the application.

Under overload most of the work is saying no, so that is done here, before JSON is looked at. A
request counts from when it has arrived as a whole: until then it costs no more than its bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from inference.server.access import request_of
from inference.server.answers import Answer, RefusedError, too_busy
from inference.server.metrics import ServerMetrics
from inference.server.settings import ServerSettings

PREDICT = "/predict"
#: Largest bodies that may be in memory at once; half of them of one client.
_LARGE_BODIES = 8
#: Bytes of a body that are not counted as such: connections are limited, and many of these small.
_SMALL_BODY = 64 << 10


class Pace:
    """How fast requests get done, and so how long a new one would wait.

    Work is measured in bytes of bodies: they are known at once, and reading them is a good part of
    the work. Times are seconds of any clock.
    """

    _LEAST_BUSY = 0.25

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()
        self._done = 0
        self._busy = self._since = 0.0
        self._rate = 0.0

    def wait(self, client: str) -> float:
        """Seconds until what a client began is done; 0 as long as nothing is known.

        Clients take turns, so no other gets more done meanwhile than this one.
        """
        if not self._rate:
            return 0.0
        own = self._waiting[client]
        return sum(min(own, bytes_) for bytes_ in self._waiting.values()) / self._rate

    def begin(self, client: str, size: int, now: float) -> None:
        """A request with so many bytes has been accepted."""
        if not self._waiting:
            self._since = now
        self._waiting[client] += size

    def end(self, client: str, size: int, now: float, *, done: bool) -> None:
        """It is over; ``done``: its work was."""
        self._waiting[client] -= size
        if not self._waiting[client]:
            del self._waiting[client]
        self._busy += now - self._since
        self._since = now
        self._done += size * done
        if self._busy >= self._LEAST_BUSY and self._done:
            rate = self._done / self._busy
            self._rate = (self._rate + rate) / 2 if self._rate else rate
            self._busy = self._done = 0


class _Request:
    """One that is being read or worked on."""

    def __init__(self, client: str, deadline: asyncio.Timeout) -> None:
        self.client, self.deadline = client, deadline
        self.body = b""
        self.complete = self.pushed_out = False
        self.counted = 0


class Admission:
    """Lets requests for :data:`PREDICT` through to ``app`` within the limits; others always.

    Args:
        app: the application; gets bodies that have been read already.
        settings: the limits.
        metrics: where requests are counted.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._accepted: dict[str, list[_Request]] = {}
        self._bytes: Counter[str] = Counter()
        self._pace = Pace()

    @property
    def requests(self) -> int:
        """Those that have been accepted and not been answered."""
        return sum(map(len, self._accepted.values()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http" or scope["path"] != PREDICT or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        answer = Answer(send)
        begin = time.perf_counter()
        deadline = asyncio.timeout(self._settings.timeout_s)
        request = _Request(request_of(scope).client, deadline)
        try:
            async with deadline:
                try:
                    await self._read(scope, receive, request)
                    self._accept(request)
                    await self._pass_on(scope, receive, answer, request)
                finally:
                    self._forget(request)
        except TimeoutError:
            await answer.refuse(self._too_late(request))
        except RefusedError as error:
            await answer.refuse(error)
        finally:
            if answer.status:
                self._metrics.requests.labels(answer.status).inc()
                if answer.status != 503:
                    self._metrics.request_seconds.observe(time.perf_counter() - begin)

    def _too_late(self, request: _Request) -> RefusedError:
        if request.pushed_out:
            return too_busy()
        if request.complete:
            return RefusedError(503, "not scored in time", remedy="try again later")
        return RefusedError(408, f"no whole body in {self._settings.timeout_s:g} s")

    def _accept(self, request: _Request) -> None:
        """Count a request that has arrived. Raises RefusedError if there are too many."""
        own = self._accepted.setdefault(request.client, [])
        try:
            if self._pace.wait(request.client) > self._settings.max_wait_ms / 1e3:
                raise too_busy()
            if self.requests >= self._settings.max_requests:
                most = max(self._accepted.values(), key=len)
                if len(most) <= len(own) + 1:
                    raise too_busy()
                last = most.pop()
                if not last.deadline.expired():  # else it leaves by itself
                    last.pushed_out = True
                    last.deadline.reschedule(asyncio.get_running_loop().time())
            own.append(request)
        finally:
            if not own:
                del self._accepted[request.client]

    def _forget(self, request: _Request) -> None:
        own = self._accepted.get(request.client, [])
        if request in own:
            own.remove(request)
            if not own:
                del self._accepted[request.client]
        self._bytes[request.client] -= request.counted
        if not self._bytes[request.client]:
            del self._bytes[request.client]

    async def _pass_on(
        self, scope: Scope, receive: Receive, answer: Answer, request: _Request
    ) -> None:
        client, size = request.client, len(request.body)
        self._pace.begin(client, size, time.perf_counter())
        try:
            # let all that have arrived be counted before any is worked on: where reading requests
            # is the bottleneck, this is where they wait
            await asyncio.sleep(0)
            await self._app(scope, _replay(request.body, receive), answer)
        finally:
            self._pace.end(client, size, time.perf_counter(), done=answer.status != 0)

    async def _read(self, scope: Scope, receive: Receive, request: _Request) -> None:
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise RefusedError(
                415, f"content type {kind.decode('latin-1')!r}", remedy="send application/json"
            )
        length = headers.get(b"content-length", b"")
        self._check_size(int(length) if length.isdigit() else 0)
        parts, size = [], 0
        while not request.complete:
            message: MutableMapping[str, Any] = await receive()
            if message["type"] == "http.disconnect":
                raise RefusedError(400, "the body ended early")
            part = message.get("body", b"")
            size += len(part)
            self._count(request, size)
            parts.append(part)
            request.complete = not message.get("more_body", False)
        request.body = b"".join(parts)

    def _check_size(self, size: int) -> None:
        limit = self._settings.max_body_bytes
        if size > limit:
            raise RefusedError(
                413,
                f"a body of more than {limit} bytes",
                remedy="send fewer rows at once; the server's --max_body_mb bounds it",
            )

    def _count(self, request: _Request, size: int) -> None:
        """Count what has come of a body, not what is announced: that may never come."""
        self._check_size(size)
        more = max(0, size - _SMALL_BODY - request.counted)
        if not more:
            return
        limit = _LARGE_BODIES * self._settings.max_body_bytes
        if self._bytes.total() + more > limit or self._bytes[request.client] + more > max(
            limit // 2, self._settings.max_body_bytes
        ):
            raise too_busy()
        self._bytes[request.client] += more
        request.counted += more


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
