"""``python -m inference serve``: a real process, asked over real sockets."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.predictor import Predictor
from tests.inference.conftest import Trained
from tests.inference.serving import JSON, Server, serving, until
from tests.inference.test_predictor import criteo_dicts
from tests.logs import random_rows


@pytest.fixture(scope="module")
def server(trained: Trained, tmp_path_factory: pytest.TempPathFactory):
    limits = "--max_rows 100 --max_body_mb 2 --timeout_s 100"
    with serving(tmp_path_factory.mktemp("server"), *trained.flags, *limits.split()) as started:
        yield started


def test_scores_are_the_predictors(server: Server, trained: Trained, predictor: Predictor) -> None:
    rows = criteo_dicts(trained.days[2])[:100]
    expected = predictor.predict(rows)
    np.testing.assert_allclose(server.predict(rows=rows), expected, atol=1e-6)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    np.testing.assert_allclose(server.predict(columns=columns), expected, atol=1e-6)
    assert server.predict(rows=[]) == []


def test_requests_at_the_same_time_get_their_own_answers(
    server: Server, predictor: Predictor
) -> None:
    before = server.metric('inference_requests_total{code="200"}')
    scored = server.metric("inference_rows_total")
    requests = [criteo_dicts(random_rows(1 + seed % 7, seed)) for seed in range(60)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda rows: server.predict(rows=rows), requests))
    for rows, answer in zip(requests, answers, strict=True):
        np.testing.assert_allclose(answer, predictor.predict(rows), atol=1e-6)
    assert server.metric('inference_requests_total{code="200"}') == before + 60
    assert server.metric("inference_rows_total") == scored + sum(map(len, requests))


def test_bad_rows_are_named(server: Server) -> None:
    rows = criteo_dicts(random_rows(30, 1))
    rows[1]["cat_3"] = "xyz"
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for body in ({"rows": rows[:2]}, {"rows": rows}, {"columns": columns}):
        got = server.refused(body, 422)
        assert (got["row"], got["column"]) == (1, "cat_3")
        reason = "'xyz': expected 1 to 8 hexadecimal digits or a missing value"
        assert got["reason"] == reason
    for flag in (True, [False]):  # no number to JSON, though one to Python
        row = {**rows[0], "more": True, "int_3": flag}
        for body in ({"rows": [row]}, {"columns": {name: [value] for name, value in row.items()}}):
            got = server.refused(body, 422)
            assert (got["row"], got["column"]) == (0, "int_3")
            assert got["reason"] == f"{flag!r}: expected an integer or a missing value"
            assert "write 1 for true" in got["remedy"]
    assert len(server.predict(rows=[rows[0] | {"more": True}])) == 1
    rows[1]["cat_3"] = None  # of several errors, that of the first row is named
    del rows[7]["cat_9"]
    for body, where in (({"rows": rows}, {"row": 7, "column": "cat_9"}),
                        ({"columns": columns | {"int_4": [1]}}, {}),
                        ({"columns": {}}, {"column": "int_0"})):  # fmt: skip
        assert where.items() <= server.refused(body, 422).items()


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b'{"rows": [', 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b'{"rows": [{"a": 1, "b": 2, "\\u0061": 2}]}', 400, "the key 'a' occurs twice"),
        (b'{"rows": [{"price": NaN}]}', 400, "NaN is not a number in JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"1" * 5000, 400, "not JSON"),
        (b"[]", 422, "a list 'rows' or an object 'columns'"),
        (b'{"rows": [], "columns": {}}', 422, "a list 'rows' or an object 'columns'"),
        (b'{"rows": [null]}', 422, "invalid row"),
        (b'{"columns": []}', 422, "an object 'columns'"),
        (b'{"columns": {"int_0": 1}}', 422, "'columns' is not a list"),
        (json.dumps({"rows": [{}] * 101}).encode(), 413, "101 rows; the limit is 100"),
        (b'{"columns": {"x": [' + b"1," * 200 + b"1]}}", 413, "201 rows; the limit is 100"),
        (b" " * 3_000_000, 413, "more than 2097152 bytes"),
        (
            b'{"rows": [' + b"[1]," * 500_000 + b"{}]}",
            413,
            "values may take 91 MiB of memory; the ",
        ),
    ],
)
def test_bad_bodies(server: Server, body: bytes, status: int, error: str) -> None:
    answer = server.refused(body, status)
    assert error in answer["error"]
    assert "'rows'" not in error or "COLUMN" in answer["remedy"]  # how a request is written


def test_other_bad_requests(server: Server) -> None:
    answer = server.refused(b'{"rows": []}', 415, **{"Content-Type": "text/plain"})
    assert "'text/plain'" in answer["error"]
    assert server.ask("/predict")[0] == 405
    assert server.ask("/none")[0] == 404
    before = server.metric('inference_requests_total{code="413"}')

    def parts():
        for number in range(30):
            if number == 25:  # beyond the limit: the answer waits for a client that still sends
                time.sleep(0.5)
            yield b" " * 100_000

    for body, status in ((parts(), 413), (iter([b'{"ro', b'ws": ', b"[]}"]), 200)):
        with contextlib.closing(server.connect()) as connection:
            connection.request("POST", "/predict", body, JSON)  # of unknown length, in chunks
            assert connection.getresponse().status == status
    assert server.metric('inference_requests_total{code="413"}') == before + 1


def test_pages(server: Server) -> None:
    assert server.ask("/health")[:2] == (200, b'{"status":"ok"}')
    assert server.ask("/ready")[:2] == (200, b'{"status":"ready"}')
    # as `promtool check metrics` has it: these endings are of counters, histograms and summaries
    page = server.ask("/metrics")[1].decode()
    gauges = [f.name for f in text_string_to_metric_families(page) if f.type == "gauge"]
    assert "inference_queue_rows" in gauges
    assert [name for name in gauges if name.endswith(("_sum", "_count", "_bucket", "_total"))] == []


def test_values_of_columns_are_counted(server: Server) -> None:
    names = (
        'inference_null_values_total{column="cat_0"}',
        'inference_probability_sum_total{label="label"}',
    )
    unseen = 'inference_oov_values_total{column="cat_25"}'
    before = [server.metric(name) for name in (*names, unseen)]
    rows = criteo_dicts(random_rows(3, 4))
    for row in rows:
        row |= {"cat_0": None, "cat_25": "fedcba98"}
    answers = server.predict(rows=rows)
    null, total, oov = (server.metric(name) for name in (*names, unseen))
    assert (null, oov) == (before[0] + 3, before[2] + 3)
    assert total == pytest.approx(before[1] + sum(answers))


def test_memory_is_bounded_and_given_back(server: Server) -> None:
    """Bodies of small lists and objects, on 24 connections at once, took 25 times their size each.

    And they kept it, in the tracebacks of the errors that refused them.
    """
    path, begin = "/v2/models/click_probability/infer", b'{"inputs": [{"name": "int_0", "data": ['
    requests = [
        ("/predict", b'{"rows": [' + b'{"":1},' * 130_000 + b"{}]}"),
        ("/predict", b'{"rows": [' + b'{"":1},' * 290_000 + b"{}]}"),
        (path, begin + b"[1]," * 170_000 + b'1], "datatype": "INT64", "shape": [1]}]}'),
    ]
    server.predict(rows=criteo_dicts(random_rows(3, 4)))
    for request in requests:  # what the first bodies take for good: threads, buffers
        server.ask(*request)
    before = server.memory("VmRSS")
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda k: server.ask(*requests[k % 3]), range(24)))
    assert {status for status, *_ in answers} <= {400, 413, 503}
    assert len({status for status, *_ in answers}) > 1
    # 8 bodies of 2 MiB, and the values of two, at most 32 MiB each
    assert server.memory("VmHWM") - before < 8 * 2 + 2 * 32 + 16
    until(lambda: server.memory("VmRSS") - before < 24)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--max_rows", "20000"], "--max_rows 20000 with --max_waiting_rows 32768"),
        (["--host", "nonsense.invalid"], "cannot listen on nonsense.invalid port 8000"),
    ],
)
def test_flags(trained: Trained, capsys, flags: list[str], message: str) -> None:
    assert main(["serve", *trained.flags, *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_port_that_is_taken(trained: Trained, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", *trained.flags, "--port", port]) == 2
    printed = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in printed
