"""Who asks, and what became of it: API keys, request ids, the access log. The outermost layer."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import logging
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from starlette.types import ASGIApp, Receive, Scope, Send

from clicklog.errors import SettingsError
from inference.server.answers import Answer, RefusedError
from inference.server.fairness import client_of
from inference.server.logs import ALWAYS

log = logging.getLogger(__name__)

#: Answered without an API key, for load balancers.
_OPEN = ("/health", "/ready")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]").search
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}").fullmatch
_LEAST_KEY = 16
_KEY = "inference.request"


@dataclasses.dataclass
class Request:
    """What is known of a request besides what it asks.

    Attributes:
        id: the client's, or made here.
        client: whose turn it is; see :mod:`.fairness`.
        rows: how many were scored; None as long as none were.
    """

    id: str = ""
    client: str = ""
    rows: int | None = None


def request_of(scope: Scope) -> Request:
    """The one that :class:`Access` put into a scope."""
    return scope.setdefault(_KEY, Request())


class ApiKeys:
    """The keys of a file, one on each line; empty lines aside.

    Raises:
        SettingsError: it cannot be read, has no key, or one that is too short to be one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests = self._read()

    def reload(self) -> None:
        """Read the file again; if that fails, say so and keep the keys."""
        try:
            self._digests = self._read()
        except SettingsError as error:
            log.error("the API keys are still those from before: %s", error, extra=ALWAYS)
        else:
            log.info("%d API keys from %s", len(self._digests), self._path, extra=ALWAYS)

    def _read(self) -> list[bytes]:
        flag = f"--api_key_file {self._path}"
        try:
            lines = self._path.read_bytes().split(b"\n")
        except OSError as error:
            raise SettingsError(f"{flag}: {error.strerror}", "pass a file that exists") from error
        keys = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
        for number, key in keys.items():
            if len(key) < _LEAST_KEY or re.search(rb"[^\x21-\x7e]", key):
                raise SettingsError(
                    f"{flag}, line {number}: no key of {_LEAST_KEY} or more ASCII characters",
                    "make one with: openssl rand -hex 32",
                )
        if not keys:
            raise SettingsError(f"{flag}: empty", "one key on each line: openssl rand -hex 32")
        return [hashlib.sha256(key).digest() for key in keys.values()]

    def client(self, headers: dict[bytes, bytes]) -> str | None:
        """The client whose key is sent, as Bearer token or X-API-Key; None if there is no such.

        How long it takes says nothing about the keys.
        """
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key.strip()).digest()
        found = [index for index, one in enumerate(self._digests)
                 if hmac.compare_digest(one, digest)]  # fmt: skip
        return f"key {self._digests[found[0]].hex()[:8]}" if found else None


class AccessLog:
    """A line of JSON for each request."""

    def __init__(self, file: TextIO) -> None:
        self._file: TextIO | None = file

    def write(self, scope: Scope, request: Request, status: int, seconds: float) -> None:
        """Write one; if nobody reads any more, say so once and write no more."""
        if self._file is None:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": request.id,
            "client": request.client,
            "method": scope["method"],
            "path": scope["path"],
            "status": status or None,
            "rows": request.rows,
            "ms": round(1e3 * seconds, 3),
        }
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            self._file = None
            log.error("the access log ends here: %s", error)


class Access:
    """Names requests, refuses those without a key, and writes down what became of them.

    Args:
        app: what answers them.
        keys: None: nobody needs one.
        access_log: None: nothing is written.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys | None = None, access_log: AccessLog | None = None
    ) -> None:
        self._app, self._keys, self._log = app, keys, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id", b"")
        if not _SANE_ID(name):
            name = os.urandom(16).hex().encode()
        client = client_of(scope["client"][0]) if scope.get("client") else ""
        request = scope[_KEY] = Request(name.decode(), client)
        answer = Answer(send, (b"x-request-id", name))
        try:
            if _CONTROL(scope["path"]):  # a route would match before a newline at the end
                await answer.refuse(RefusedError(404, "a path with a control character"))
                return
            if self._keys is not None and scope["path"] not in _OPEN:
                known = self._keys.client(headers)
                if known is None:
                    await answer.refuse(
                        RefusedError(
                            401, "no valid API key", remedy="send it as Authorization: Bearer KEY"
                        )
                    )
                    return
                request.client = known
            await self._app(scope, receive, answer)
        finally:
            if self._log is not None:
                self._log.write(scope, request, answer.status, time.perf_counter() - begin)
