"""Limits of the number, size and duration of requests: an ASGI middleware.

Under overload most requests are refused, so they are refused here, before their JSON is parsed. A
request counts once its whole body has arrived; until then it costs only memory.

Starlette has no middleware for any of this. Uvicorn's ``limit_concurrency`` is one number for all
clients and counts requests whose body has not arrived. Packages for rate limits (limits, slowapi)
bound a client's requests in a time window, which says nothing about how long one has to wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from nvt_torchrec.inference.server.access import request_of
from nvt_torchrec.inference.server.answers import Answer, RefusedError, too_busy
from nvt_torchrec.inference.server.metrics import ServerMetrics
from nvt_torchrec.inference.server.settings import ServerSettings

PREDICT = "/predict"
#: Bodies of the largest size that may be in memory at once; half of them from one client.
_LARGE_BODIES = 8
#: Bytes of each body that do not count: the number of connections bounds them.
_UNCOUNTED_BYTES = 64 << 10


class WaitEstimate:
    """Estimates how long a new request would wait, from the rate of the last answers.

    Work is measured in bytes of bodies, which are known at once; much of it is parsing them.
    Times are seconds of any clock.
    """

    _MIN_BUSY_S = 0.25

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()
        self._done = 0
        self._busy = self._since = 0.0
        self._rate = 0.0

    def wait(self, client: str) -> float:
        """Return the seconds until a client's requests are done; 0 before the rate is known.

        Clients take turns, so meanwhile no other client gets more done than this one.
        """
        if not self._rate:
            return 0.0
        own = self._waiting[client]
        return sum(min(own, bytes_) for bytes_ in self._waiting.values()) / self._rate

    def begin(self, client: str, size: int, now: float) -> None:
        """Add a request with ``size`` bytes, which was accepted."""
        if not self._waiting:
            self._since = now
        self._waiting[client] += size

    def end(self, client: str, size: int, now: float, *, done: bool) -> None:
        """Remove a request; ``done`` says whether it was answered."""
        self._waiting[client] -= size
        if not self._waiting[client]:
            del self._waiting[client]
        self._busy += now - self._since
        self._since = now
        self._done += size * done
        if self._busy >= self._MIN_BUSY_S and self._done:
            rate = self._done / self._busy
            self._rate = (self._rate + rate) / 2 if self._rate else rate
            self._busy = self._done = 0


class _Request:
    """A request to :data:`PREDICT` that is being received or answered."""

    def __init__(self, client: str, deadline: asyncio.Timeout) -> None:
        self.client, self.deadline = client, deadline
        self.body = b""
        self.complete = self.displaced = False
        self.counted_bytes = 0


class Admission:
    """Passes requests to ``app``; those to :data:`PREDICT` within the limits, others always.

    Args:
        app: The application. It gets bodies that have arrived as a whole.
        settings: The limits.
        metrics: Counts the requests.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._accepted: dict[_Request, None] = {}  # in their order
        self._bytes: Counter[str] = Counter()
        self._estimate = WaitEstimate()

    @property
    def requests(self) -> int:
        """The number of requests that were accepted and are not answered yet."""
        return len(self._accepted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI defines it."""
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
                    await self._receive_body(scope, receive, request)
                    self._accept(request)
                    await self._answer(scope, receive, answer, request)
                finally:
                    self._remove(request)
        except TimeoutError:
            await answer.refuse(self._timeout_error(request))
        except RefusedError as error:
            await answer.refuse(error)
        finally:
            if answer.status:
                self._metrics.requests.labels(answer.status).inc()
                if answer.status != 503:
                    self._metrics.request_seconds.observe(time.perf_counter() - begin)

    def _timeout_error(self, request: _Request) -> RefusedError:
        if request.displaced:
            return too_busy()
        if request.complete:
            return RefusedError(503, "not scored in time", remedy="try again later")
        return RefusedError(408, f"the body was not complete within {self._settings.timeout_s:g} s")

    def _accept(self, request: _Request) -> None:
        """Accept a complete request, perhaps in the place of another client's last one.

        Raises:
            RefusedError: It would wait too long, or there are too many.
        """
        if self._estimate.wait(request.client) > self._settings.max_wait_ms / 1e3:
            raise too_busy()
        if self.requests >= self._settings.max_requests:
            counts = Counter(accepted.client for accepted in self._accepted)
            client, most = counts.most_common(1)[0]
            if most <= counts[request.client] + 1:
                raise too_busy()
            last = next(r for r in reversed(self._accepted) if r.client == client)
            del self._accepted[last]
            if not last.deadline.expired():  # else it ends by itself
                last.displaced = True
                last.deadline.reschedule(asyncio.get_running_loop().time())
        self._accepted[request] = None

    def _remove(self, request: _Request) -> None:
        self._accepted.pop(request, None)
        self._bytes[request.client] -= request.counted_bytes
        if not self._bytes[request.client]:
            del self._bytes[request.client]

    async def _answer(
        self, scope: Scope, receive: Receive, answer: Answer, request: _Request
    ) -> None:
        client, size = request.client, len(request.body)
        self._estimate.begin(client, size, time.perf_counter())
        try:
            # count all requests that have arrived before parsing any: where parsing is the
            # bottleneck, they wait here
            await asyncio.sleep(0)
            await self._app(scope, _replay(request.body, receive), answer)
        finally:
            self._estimate.end(client, size, time.perf_counter(), done=answer.status != 0)

    async def _receive_body(self, scope: Scope, receive: Receive, request: _Request) -> None:
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
                raise RefusedError(400, "the connection ended before the body did")
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
                remedy="send fewer rows in a request, or raise the server's --max_body_mb",
            )

    def _count(self, request: _Request, size: int) -> None:
        """Count the bytes of a body that have arrived. Those announced may never arrive."""
        self._check_size(size)
        more = max(0, size - _UNCOUNTED_BYTES - request.counted_bytes)
        if not more:
            return
        limit = _LARGE_BODIES * self._settings.max_body_bytes
        if self._bytes.total() + more > limit or self._bytes[request.client] + more > max(
            limit // 2, self._settings.max_body_bytes
        ):
            raise too_busy()
        self._bytes[request.client] += more
        request.counted_bytes += more


def _replay(data: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives a complete body, and then what the connection gives."""
    sent = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    return replay
