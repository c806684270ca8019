"""API keys, request ids, the access log, TLS, traces."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from nvt_torchrec.inference.server.access import Access, AccessLog, ApiKeys, request_of
from nvt_torchrec.inference.server.sockets import tls_context

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.server.metrics import ServerMetrics
from tests.inference.conftest import ROOT, Trained
from tests.inference.serving import serving
from tests.inference.test_predictor import criteo_dicts
from tests.logs import random_rows

KEY, OTHER_KEY = "0123456789abcdef", "fedcba9876543210-new"


def _ask(access: Access, path: str = "/predict", **headers: str) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "client": ("192.0.2.1", 1),
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ],
    }
    asyncio.run(access(scope, None, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def _app(seen: list):
    async def app(scope, receive, send) -> None:
        request = request_of(scope)
        request.rows = 3
        seen.append(request)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


def test_a_key_is_needed_where_there_are_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\n{KEY}\n  {OTHER_KEY}  \n")
    seen: list = []
    metrics = ServerMetrics(())
    access = Access(_app(seen), metrics, ApiKeys(file))
    wrong = (
        {},
        {"authorization": "Bearer 0123456789abcdeF"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}, {KEY}"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"x_api_key": ""},
        {"x_api_key": f"{KEY}\n{OTHER_KEY}"},
    )
    for headers in wrong:
        status, answer = _ask(access, **headers)
        assert (status, answer["www-authenticate"]) == (401, "Bearer"), headers
        assert _ask(access, "/metrics", **headers)[0] == 401
    assert not seen
    assert b'inference_requests_total{code="401"} 14.0\n' in metrics.page()
    for path in ("/health", "/ready"):
        assert _ask(access, path)[0] == 200
    right = ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"},
             {"x_api_key": KEY}, {"x_api_key": OTHER_KEY})  # fmt: skip
    assert [_ask(access, **headers)[0] for headers in right] == [200] * 4
    clients = [request.client for request in seen]
    assert clients[0] == clients[1] == "192.0.2.1"  # without a key it is the address
    assert clients[2] == clients[3] == clients[4] != clients[5]
    assert not any(KEY[:6] in client or OTHER_KEY[:6] in client for client in clients)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), (f"{KEY}\nshort\n", "line 2"), (f"{KEY} {KEY}", "line 1"), (None, "No such")],
)
def test_files_without_keys(
    tmp_path: Path, trained: Trained, capsys, text: str | None, message: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    assert main(["serve", *trained.flags, "--port", "0", "--api_key_file", str(file)]) == 2
    assert re.search(f"--api_key_file .*keys.*{message}", capsys.readouterr().err)


def test_requests_have_ids() -> None:
    seen: list = []
    access = Access(_app(seen), ServerMetrics(()))
    for name in ("abc-1.2:3/4=", "x" * 128):
        assert _ask(access, x_request_id=name)[1]["x-request-id"] == name
        assert seen[-1].id == name
    made = {
        _ask(access, x_request_id=bad)[1]["x-request-id"] for bad in ("", "a b", "x" * 129, '"')
    }
    assert len(made) == 4
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in made)


def test_the_access_log_is_json() -> None:
    file = io.StringIO()
    access = Access(_app([]), ServerMetrics(()), access_log=AccessLog(file))
    _ask(access, '/pre"\ndict', x_request_id="abc")
    line = json.loads(file.getvalue())
    assert file.getvalue().count("\n") == 1
    assert line.pop("ms") >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert line == {
        **{"id": "abc", "client": "192.0.2.1", "method": "POST", "path": '/pre"\ndict'},
        **{"status": 404, "rows": None},
    }
    file.close()  # nobody reads any more: requests are answered still
    assert _ask(access)[0] == 200


def _certificate(directory: Path, name: str) -> None:
    """A key and a certificate of its own for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 "
        f"-subj /CN={name} -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(command.split(), cwd=directory, check=True, capture_output=True)


def test_tls_keys_and_access_log_of_a_server(bundle: Path, tmp_path: Path) -> None:
    _certificate(tmp_path, "first")
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    flags = ["--bundle", str(bundle), "--access_log", "--api_key_file", str(keys)]
    flags += ["--tls_cert", str(tmp_path / "cert.pem"), "--tls_key", str(tmp_path / "key.pem")]
    flags += ["--trusted_proxies", "127.0.0.0/24"]
    rows = criteo_dicts(random_rows(2, 1))

    def ask(key: str) -> tuple[int, str]:
        """Status, and who the certificate is for."""
        context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.port, timeout=100, context=context
        )
        headers = {"Content-Type": "application/json", "X-API-Key": key, "X-Request-ID": "abc"}
        headers["X-Forwarded-For"] = "203.0.113.9"
        connection.request("POST", "/predict", json.dumps({"rows": rows}), headers)
        name = connection.sock.getpeercert()["subject"][0][0][1]
        answer = connection.getresponse()
        assert answer.headers["X-Request-ID"] == "abc"
        answer.read()
        connection.close()
        return answer.status, name

    with serving(tmp_path, *flags) as server:
        assert [ask(KEY), ask(OTHER_KEY)] == [(200, "first"), (401, "first")]
        lines = [json.loads(server.process.stdout.readline()) for _ in range(2)]
        assert [(line["status"], line["rows"]) for line in lines] == [(200, 2), (401, None)]
        assert {line["id"] for line in lines} == {"abc"}
        assert lines[1]["client"] == "203.0.113.9"
        assert lines[0]["client"].startswith("key ")
        with server.open() as connection:  # no TLS
            connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert connection.recv(1 << 16)[:4] != b"HTTP"
        _certificate(tmp_path, "second")
        keys.write_text(OTHER_KEY)
        server.process.send_signal(signal.SIGHUP)
        while (got := ask(OTHER_KEY)) != (200, "second"):
            assert got[0] in (200, 401)
        assert ask(KEY)[0] == 401
        keys.write_text("")
        server.process.send_signal(signal.SIGHUP)
        while "keeping the previous API keys" not in server.stderr.read_text():
            pass
        assert ask(OTHER_KEY)[0] == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    _certificate(tmp_path, "first")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    tls_context(cert, key)
    subprocess.run(
        [
            "openssl",
            "pkey",
            "-in",
            key,
            "-aes128",
            "-passout",
            "pass:x",
            "-out",
            tmp_path / "locked",
        ],
        check=True,
    )
    for wrong in ((cert, None), (tmp_path / "none", key), (key, key), (cert, tmp_path / "locked")):
        with pytest.raises(SettingsError, match="--tls_cert"):
            tls_context(*wrong)


def test_traces_say_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry.sdk"] = None  # as if it were not installed
from nvt_torchrec.inference.server.telemetry import traced
traced(None)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert re.search("SettingsError: --otel: .*\n.*pip install opentelemetry-", done.stderr)
