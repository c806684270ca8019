"""API keys, request ids and the access log: the outermost ASGI middleware.

Starlette's AuthenticationMiddleware would leave the comparison of keys, most of this, to own code.
Uvicorn's access log has neither request ids nor keys, rows or durations.
"""

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

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.inference.server.answers import Answer, RefusedError
from nvt_torchrec.inference.server.fairness import client_of
from nvt_torchrec.inference.server.logs import ALWAYS
from nvt_torchrec.inference.server.metrics import ServerMetrics

log = logging.getLogger(__name__)

#: Paths that are answered without an API key, for load balancers.
_PUBLIC = ("/health", "/ready")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]").search
_VALID_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}").fullmatch
_MIN_KEY_LENGTH = 16
_SCOPE_KEY = "inference.request"


@dataclasses.dataclass
class Request:
    """What the server knows of a request besides its content.

    Attributes:
        id: The request id that the client sent, or a new one.
        client: The client that the request counts for; see :mod:`.fairness`.
        rows: The number of rows scored; None before that.
    """

    id: str = ""
    client: str = ""
    rows: int | None = None


def request_of(scope: Scope) -> Request:
    """Return the request that :class:`Access` put into a scope."""
    return scope.setdefault(_SCOPE_KEY, Request())


class ApiKeys:
    """The keys of a file with one key on each line. Empty lines are ignored.

    Raises:
        SettingsError: The file cannot be read, has no key, or has one that is too short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests = self._read()

    def reload(self) -> None:
        """Read the file again; if that fails, log the reason and keep the keys."""
        try:
            self._digests = self._read()
        except SettingsError as error:
            log.error("keeping the previous API keys: %s", error, extra=ALWAYS)
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
            if len(key) < _MIN_KEY_LENGTH or re.search(rb"[^\x21-\x7e]", key):
                raise SettingsError(
                    f"{flag}, line {number}: not a key: {_MIN_KEY_LENGTH} or more visible ASCII "
                    "characters are needed",
                    "make one with: openssl rand -hex 32",
                )
        if not keys:
            raise SettingsError(f"{flag}: empty", "one key on each line: openssl rand -hex 32")
        return [hashlib.sha256(key).digest() for key in keys.values()]

    def client(self, headers: dict[bytes, bytes]) -> str | None:
        """Return the client of the key that is sent, as bearer token or X-API-Key; else None.

        The time that this takes does not depend on the keys.
        """
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key.strip()).digest()
        found = [known for known in self._digests if hmac.compare_digest(known, digest)]
        return f"key {found[0].hex()[:8]}" if found else None


class AccessLog:
    """Writes a line of JSON for each request."""

    def __init__(self, file: TextIO) -> None:
        self._file: TextIO | None = file

    def write(self, scope: Scope, request: Request, status: int, seconds: float) -> None:
        """Write a line. If the file cannot be written, log that once and write no more."""
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
    """Gives requests an id, refuses those without a valid key, and writes the access log.

    Args:
        app: The application.
        metrics: Counts refused requests.
        keys: The valid keys; None if no key is needed.
        access_log: The access log; None if there is none.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        keys: ApiKeys | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        self._app, self._metrics, self._keys, self._log = app, metrics, keys, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI defines it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id", b"")
        if not _VALID_ID(name):
            name = os.urandom(16).hex().encode()
        client = client_of(scope["client"][0]) if scope.get("client") else ""
        request = scope[_SCOPE_KEY] = Request(name.decode(), client)
        answer = Answer(send, (b"x-request-id", name))
        try:
            if _CONTROL_CHARACTER(scope["path"]):  # a route would match before a newline at the end
                await answer.refuse(RefusedError(404, "the path has a control character"))
                return
            if self._keys is not None and scope["path"] not in _PUBLIC:
                owner = self._keys.client(headers)
                if owner is None:
                    self._metrics.requests.labels(401).inc()
                    remedy = "send it as Authorization: Bearer KEY"
                    await answer.refuse(RefusedError(401, "no valid API key", remedy=remedy))
                    return
                request.client = owner
            await self._app(scope, receive, answer)
        finally:
            if self._log is not None:
                self._log.write(scope, request, answer.status, time.perf_counter() - begin)
