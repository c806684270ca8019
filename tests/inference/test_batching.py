"""The queue before the model, the limits before it, and what may come as JSON: in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvt_torchrec.inference.server.admission import Admission, WaitEstimate
from nvt_torchrec.inference.server.answers import RefusedError

from nvt_torchrec.formats.rows import Jagged
from nvt_torchrec.inference import Predictor
from nvt_torchrec.inference.server.app import Service, make_service, parse_body
from nvt_torchrec.inference.server.batching import Batch, Batcher
from nvt_torchrec.inference.server.metrics import ServerMetrics
from nvt_torchrec.inference.server.served import Served
from nvt_torchrec.inference.server.settings import ServerSettings
from nvt_torchrec.workflows.compiled.workflow import EncodedRows

_NONE = np.zeros(1, np.int64)


def request(*values: int) -> EncodedRows:
    """Rows with one dense column, and a list of so many ids in each."""
    dense = np.array([values], np.float32)
    offsets = np.cumsum([0, *values], dtype=np.int32)
    ids = Jagged(offsets, np.repeat(np.array(values, np.int32), values))
    return EncodedRows(None, dense, [ids, np.array(values, np.int32)], _NONE, _NONE)


class Model:
    """Waits to be let go on; its probabilities are the dense values, if the ids agree with them."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.sizes: list[int] = []

    def __call__(self, dense: np.ndarray, ids: list) -> np.ndarray:
        assert self.go.acquire(timeout=100)
        self.sizes.append(dense.shape[1])
        lists, single = ids
        assert len(lists) == len(single) == dense.shape[1]
        for i, value in enumerate(dense[0]):
            values = lists.values[lists.offsets[i] : lists.offsets[i + 1]]
            assert values.tolist() == [value] * int(value)
            assert single[i] == value
        if 13 in single:
            raise MemoryError("thirteen")
        return dense[0]


@pytest.fixture
def batches() -> list[Batch]:
    return []


def run(model: Model, batches: list, check, **settings) -> None:
    """Run ``check(batcher)`` on an event loop."""
    options = {"batch_rows": 8, "delay": 0.0, "observe": batches.append}
    batcher = Batcher(**options | settings)
    try:
        asyncio.run(check(batcher))
    finally:
        model.go.release(1000)
        batcher.close()


async def _queued(batcher: Batcher, model: Model, *requests: EncodedRows) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(batcher.score(model, rows)) for rows in requests]
    await asyncio.sleep(0)
    return tasks


async def _taken(batcher: Batcher) -> None:
    """Until the model has what waited."""
    while batcher.waiting_rows:
        await asyncio.sleep(0)


def test_what_waits_goes_together_up_to_the_size_of_a_batch(batches: list) -> None:
    model = Model()

    async def check(batcher: Batcher) -> None:
        first = await _queued(batcher, model, request(5))
        await _taken(batcher)  # the model is busy with it
        sizes = [3, 1, 4, 2, 12, 1]
        requests = [request(*range(size)) for size in sizes]
        rest = await _queued(batcher, model, *requests)
        model.go.release(100)
        answers = await asyncio.gather(*first, *rest)
        assert answers[0].tolist() == [5]
        for answer, size in zip(answers[1:], sizes, strict=True):
            assert answer.tolist() == list(range(size))

    run(model, batches, check)
    assert model.sizes == [1, 8, 2, 8, 5]  # twelve rows are more than a batch
    assert [len(batch.requests) for batch in batches] == [1, 3, 1, 1, 2]
    assert all(min(batch.waited) >= 0 and batch.seconds >= 0 for batch in batches)


def test_a_batch_is_of_one_model(batches: list) -> None:
    """Requests that were encoded by another bundle wait, though there is room for them."""
    old, new = Model(), Model()

    async def check(batcher: Batcher) -> None:
        first = await _queued(batcher, old, request(9))
        await _taken(batcher)
        rest = [
            *await _queued(batcher, old, request(1), request(2, 3)),
            *await _queued(batcher, new, request(4), request(5)),
            *await _queued(batcher, old, request(6)),
        ]
        old.go.release(100)
        new.go.release(100)
        answers = await asyncio.gather(*first, *rest)
        assert [answer.tolist() for answer in answers] == [[9], [1], [2, 3], [4], [5], [6]]

    run(old, batches, check)
    assert (old.sizes, new.sizes) == ([1, 3, 1], [2])
    assert [batch.model for batch in batches] == [old, old, new, old]


def test_the_pace_says_how_long_a_request_would_wait() -> None:
    pace = WaitEstimate()
    pace.begin("a", 1000, 5.0)
    assert pace.wait("a") == 0  # nothing is known yet
    pace.begin("a", 3000, 5.5)
    pace.end("a", 1000, 6.0, done=True)
    assert pace.wait("a") == pytest.approx(3.0)  # 3000 bytes at 1000/s
    pace.end("a", 3000, 6.5, done=True)  # 6000/s, and the mean with what was known
    pace.begin("a", 7000, 100.0)  # idle time counts for nothing
    assert pace.wait("a") == pytest.approx(2.0)
    pace.end("a", 7000, 200.0, done=False)  # not done: no pace, though it takes its time
    assert pace.wait("a") == 0
    pace.begin("a", 3500, 300.0)
    assert pace.wait("a") == pytest.approx(1.0)
    pace.end("a", 3500, 335.0, done=True)  # 135 s for 3500 bytes
    pace.begin("a", 3500, 400.0)
    assert pace.wait("a") == pytest.approx(3500 / ((3500 + 3500 / 135) / 2))


def test_who_has_gone_is_not_worked_for(batches: list) -> None:
    model = Model()

    async def check(batcher: Batcher) -> None:
        first = await _queued(batcher, model, request(1))
        await _taken(batcher)
        waiting = await _queued(batcher, model, request(2), request(3))
        waiting[0].cancel()
        first[0].cancel()
        await asyncio.wait([waiting[0], first[0]])
        model.go.release(100)
        assert (await waiting[1]).tolist() == [3]

    run(model, batches, check)
    assert model.sizes == [1, 1]


def test_a_batch_that_fails_harms_no_other(batches: list) -> None:
    model = Model()
    model.go.release(100)

    async def check(batcher: Batcher) -> None:
        with pytest.raises(MemoryError, match="thirteen"):
            await batcher.score(model, request(13))
        assert (await batcher.score(model, request(2))).tolist() == [2]

    run(model, batches, check)
    assert len(batches) == 1


def test_a_batch_is_delayed_until_it_is_full_or_delays_are_stopped(batches: list) -> None:
    model = Model()
    model.go.release(100)

    async def check(batcher: Batcher) -> None:
        tasks = await _queued(batcher, model, request(1, 2, 3, 4), request(1, 2, 3))
        assert batcher.waiting_rows == 7
        assert (await batcher.score(model, request(5))).tolist() == [5]
        await asyncio.gather(*tasks)
        tasks = await _queued(batcher, model, request(6))
        batcher.stop_delaying()
        assert (await tasks[0]).tolist() == [6]

    run(model, batches, check, delay=1000.0)
    assert model.sizes == [8, 1]


def test_what_is_not_scored_in_time_gets_503() -> None:
    ended = []

    async def never(scope, receive, send) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append((await receive())["body"])

    limits = ServerSettings(timeout_s=0.01, batch_delay_ms=0)
    admission = Admission(never, limits, ServerMetrics(("a",)))
    sent = []
    headers = [(b"content-type", b"application/json; charset=utf-8"), (b"content-length", b"2")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}

    async def receive() -> dict:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(admission(scope, receive, send))
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"1") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"] == "not scored in time"
    assert ended == [b"{}"]
    assert admission.requests == 0


def _predict(service: Service, body: bytes) -> tuple[int, dict]:
    """Status and answer of ``POST /predict``, without a socket."""
    sent = []

    async def receive() -> dict:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    path = {"path": "/predict", "raw_path": b"/predict", "query_string": b"", "root_path": ""}
    scope = {"type": "http", "method": "POST", "headers": headers, **path}
    asyncio.run(service.app(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_what_is_not_finite_is_an_error(shop_predictor: Predictor) -> None:
    """One row's weights are damaged: it is named, and others are scored."""
    model, spec = shop_predictor.model, shop_predictor.spec
    row = dict.fromkeys(column.name for column in (*spec.dense, *spec.categorical))
    first_price = spec.dense[0].name
    weight, bias = model.layers["bottom"][0]
    weight = weight.clone()
    weight[:, 0] = float("inf")  # times 0 it is NaN, else infinite: 0 or 1, or NaN after that
    layers = model.layers | {"bottom": [(weight, bias), *model.layers["bottom"][1:]]}
    damaged = dataclasses.replace(model, layers=layers)
    service = make_service(Served(Predictor(shop_predictor.workflow, damaged)), ServerSettings())
    status, answer = _predict(service, json.dumps({"rows": [row | {first_price: 7}, row]}).encode())
    assert status == 500
    assert answer["error"] == "the model computed the probability nan"
    assert isinstance(answer["row"], int)
    assert "weights" in answer["remedy"]
    page = service.metrics.page().decode()
    assert "inference_rows_total 2.0" in page
    assert "nan" not in page.lower()


@pytest.mark.parametrize(
    "body",
    [
        b'{"rows": [], "rows": []}',
        b'{"rows": [{"a": 1, "b": 2, "a": 1}]}',
        b'{"rows": [{"x": {"a": 1, "\\u0061": 2}}]}',
        b'{"columns": {"a": [1], "b": [], "a": [2]}}',
    ],
)
def test_a_key_may_be_there_once(shop_predictor: Predictor, body: bytes) -> None:
    with pytest.raises(RefusedError, match=r"not JSON: the key '(a|rows)' occurs twice") as caught:
        parse_body(body, shop_predictor, 100)
    assert caught.value.status == 400


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_what_is_no_number_of_json_is_refused(shop_predictor: Predictor, number: bytes) -> None:
    with pytest.raises(RefusedError, match=r"not JSON: .* a missing value is null") as caught:
        parse_body(b'{"rows": [{"price": %s}]}' % number, shop_predictor, 100)
    assert caught.value.status == 400


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), count=st.sampled_from([1, 2, 20]), by_column=st.booleans())
def test_any_json_is_scored_or_refused(
    data, count: int, by_column: bool, shop_predictor: Predictor
) -> None:
    spec = shop_predictor.spec
    columns = [column.name for column in (*spec.dense, *spec.categorical)]
    rows: list = [dict.fromkeys(columns) for _ in range(count)]
    for _ in range(data.draw(st.integers(0, 3))):
        row = data.draw(st.integers(0, count - 1))
        rows[row][data.draw(st.sampled_from(columns))] = data.draw(_VALUES)
    value = {"rows": rows}
    if by_column:
        value = {"columns": {name: [row[name] for row in rows] for name in columns}}
        if data.draw(st.booleans()):
            value["columns"][data.draw(st.sampled_from(columns))] = data.draw(_VALUES)
    if data.draw(st.integers(0, 9)) == 0:
        value = data.draw(_VALUES)
    refused = []
    try:
        encoded = parse_body(json.dumps(value).encode(), shop_predictor, 100)
    except RefusedError as error:
        refused.append((error.status, json.dumps(error.details)))
    if refused:
        assert refused[0][0] in (413, 422)
    else:
        assert np.isfinite(shop_predictor.predict_encoded(encoded.dense, encoded.ids)).all()
