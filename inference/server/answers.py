"""Answers that say no."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from starlette.types import Send

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

    def content(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Headers and body of the answer."""
        body = json.dumps(self.details).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status == 503:
            headers.append(_RETRY_AFTER)
        if self.status in (408, 413, 431):  # what is left of the request is not waited for
            headers.append((b"connection", b"close"))
        return headers, body


def too_busy() -> RefusedError:
    """503."""
    return RefusedError(503, "too many requests are waiting", remedy="try again later")


class Answer:
    """Passes an answer on, and remembers its status; 0 as long as there is none.

    Args:
        send: of ASGI.
        headers: added to the answer's.
    """

    def __init__(self, send: Send, *headers: tuple[bytes, bytes]) -> None:
        self._send, self._headers = send, headers
        self.status = 0

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """As ASGI has it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._headers:
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)

    async def refuse(self, error: RefusedError) -> None:
        """Say no, unless an answer is under way already."""
        if self.status:
            return
        headers, body = error.content()
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": body})
