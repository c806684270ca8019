"""Answers to requests that are refused."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from starlette.types import Send

_RETRY_AFTER = (b"retry-after", b"1")


class RefusedError(Exception):
    """A request is answered with an error.

    Attributes:
        status: The HTTP status.
        details: The JSON object of the answer.
    """

    def __init__(self, status: int, error: str, **details: Any) -> None:
        super().__init__(error)
        self.status, self.details = status, {"error": error, **details}

    def content(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return headers and body of the answer."""
        body = json.dumps(self.details).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status == 503:
            headers.append(_RETRY_AFTER)
        if self.status in (408, 413, 431):  # the rest of the request is not read
            headers.append((b"connection", b"close"))
        return headers, body


def too_busy() -> RefusedError:
    """Return the error for a request that would have to wait too long."""
    return RefusedError(503, "too many requests are waiting", remedy="try again later")


class Answer:
    """Sends an answer, and records its status (0 before it begins).

    Args:
        send: The function to send with, as ASGI defines it.
        headers: Headers to add to the answer.
    """

    def __init__(self, send: Send, *headers: tuple[bytes, bytes]) -> None:
        self._send, self._headers = send, headers
        self.status = 0

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Send a message, as ASGI defines it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._headers:
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)

    async def refuse(self, error: RefusedError) -> None:
        """Send an error, unless an answer has begun."""
        if self.status:
            return
        headers, body = error.content()
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": body})
