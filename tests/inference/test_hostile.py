"""Requests made to do harm, and what goes wrong around them: in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import signal
import ssl
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import uvicorn
from nvt_torchrec.inference.server.access import ApiKeys
from nvt_torchrec.inference.server.logs import RateLimit
from nvt_torchrec.inference.server.sockets import tls_context

from nvt_torchrec.base.files.atomic import unique_keys
from nvt_torchrec.inference import Predictor
from nvt_torchrec.inference.server import app as server_app
from nvt_torchrec.inference.server import fairness, run
from nvt_torchrec.inference.server.app import make_service
from nvt_torchrec.inference.server.served import Served
from nvt_torchrec.inference.server.settings import ServerSettings
from tests.inference.conftest import ROOT
from tests.inference.test_access import _certificate
from tests.inference.test_malformed import ROWS
from tests.inference.test_malformed import bundle as untrained  # noqa: F401


@pytest.fixture
def predictor(untrained: Path) -> Predictor:  # noqa: F811
    """Of a model that nobody trained."""
    return Predictor.load(untrained)


class _Key(str):
    """Counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        _Key.compared += 1
        return str.__eq__(self, other)


def test_a_key_that_is_twice_is_found_in_one_pass() -> None:
    keys = [_Key(i) for i in range(1000)] + [_Key(999)]
    with pytest.raises(ValueError, match="'999' occurs twice"):
        unique_keys([(key, 0) for key in keys])
    assert _Key.compared < 3000


def test_a_turn_is_given_back_if_no_thread_starts(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service(Served(predictor), ServerSettings())
    body = json.dumps({"rows": ROWS}).encode() + b" " * (64 << 10)
    fails = [True] * 3
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.startswith("parser") and fails:
            fails.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)

    async def ask() -> None:
        statuses = []
        for _ in range(4):
            status, _ = await asyncio.wait_for(_ask(service, "/predict", body), 600)
            statuses.append(status)
        assert statuses == [500, 500, 500, 200]

    try:
        asyncio.run(ask())
    finally:
        service.batcher.close()


async def _ask(service: server_app.Service, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of an answer."""
    sent: list[dict] = []
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "client": ("192.0.2.1", 1),
        "headers": [(b"content-type", b"application/json")],
    }
    try:
        await service.app(scope, receive, send)
    except RuntimeError:  # Starlette answers 500, and raises it for the log
        assert sent
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_a_parser_thread_that_is_stuck_does_not_keep_the_process_from_ending() -> None:
    code = "import threading; from nvt_torchrec.inference.server.app import _in_thread; "
    code += "_in_thread(threading.Event().wait)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=600).returncode == 0


@pytest.mark.parametrize("end", ["\n", "\r", "\x00", "\x7f", "\x85"])
def test_no_path_goes_round_admission(predictor: Predictor, end: str) -> None:
    service = make_service(Served(predictor), ServerSettings(max_rows=1))
    try:
        status, answer = asyncio.run(_ask(service, "/predict" + end, b'{"rows": []}'))
    finally:
        service.batcher.close()
    assert status == 404
    assert "control character" in json.loads(answer)["error"]


def test_half_a_surrogate_pair_in_a_name_is_refused(predictor: Predictor) -> None:
    service = make_service(Served(predictor), ServerSettings())
    try:
        body = b'{"columns": {"\\ud800": 3}}'
        status, answer = asyncio.run(_ask(service, "/predict", body))
    finally:
        service.batcher.close()
    assert status == 422
    assert json.loads(answer)["column"] == "\ud800"


def test_long_texts_that_are_no_addresses_are_not_kept() -> None:
    kept = fairness._client_of.cache_info().currsize
    assert fairness.client_of("x" * 65) == "x" * 65
    assert fairness._client_of.cache_info().currsize == kept


def test_every_reload_that_fails_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("0123456789abcdef")
    keys = ApiKeys(file)
    file.write_text("")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    handler.addFilter(RateLimit())
    monkeypatch.setattr(
        logging.getLogger("nvt_torchrec.inference.server.access"), "handlers", [handler]
    )
    for _ in range(3):
        keys.reload()
    assert len(lines) == 3


def test_ctrl_c_is_the_parents_business(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[int] = []
    monkeypatch.setattr(uvicorn.Server, "handle_exit", lambda _, sig, frame: got.append(sig))
    server = run._Server.__new__(run._Server)
    server._service, server._loop = types.SimpleNamespace(draining=False), None
    server._settings = ServerSettings()
    server.handle_exit(signal.SIGINT, None)
    assert got == [signal.SIGINT]
    server._service.draining = False
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    server.handle_exit(signal.SIGINT, None)
    assert (got, server._service.draining) == ([signal.SIGINT], False)
    server.handle_exit(signal.SIGTERM, None)
    assert got == [signal.SIGINT, signal.SIGTERM]


def test_a_certificate_that_does_not_fit_its_key_changes_nothing(tmp_path: Path, caplog) -> None:
    pairs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        _certificate(tmp_path / name, name)
        pairs.append((tmp_path / name / "cert.pem", tmp_path / name / "key.pem"))
    (cert, key), (other_cert, _) = pairs
    first = cert.read_text()
    settings = ServerSettings(tls_cert=cert, tls_key=key)
    context = tls_context(cert, key)
    cert.write_bytes(other_cert.read_bytes())
    run._reload(settings, None, context, [])
    assert "keeping the previous certificate" in caplog.text
    inbox, outbox = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cadata=first).wrap_bio(
        outbox, inbox, server_hostname="127.0.0.1"
    )
    server = context.wrap_bio(inbox, outbox, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    assert client.getpeercert()["subject"][0][0][1] == "first"
