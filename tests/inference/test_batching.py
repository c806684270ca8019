"""The queue before the model, the limits before it, and what may come as JSON: in this process."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.app import Service
from nvt_torchrec.inference.server.batching import Batcher, RequestBatch
from nvt_torchrec.inference.server.bodies import RefusedError, parse_body
from nvt_torchrec.inference.server.reload import Served
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from nvt_torchrec.workflows.compiled.encoded_rows import EncodedRows, join_rows

_NONE = np.zeros(1, np.int64)


def request(*values: int) -> EncodedRows:
    """Rows with one dense column, and a list of so many ids in each."""
    dense = np.array([values], np.float32)
    lengths = np.array([values, [1] * len(values)])
    columns = [np.repeat(np.array(values, np.int32), values), np.array(values, np.int32)]
    return EncodedRows(dense[:0], dense, Ids.from_lengths(columns, lengths), _NONE, _NONE)


class Model:
    """Waits to be let go on; its probabilities are the dense values, if the ids agree with them."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.sizes: list[int] = []

    def __call__(self, parts: Sequence[EncodedRows]) -> np.ndarray:
        dense, ids = join_rows(parts)
        assert self.go.acquire(timeout=600)
        self.sizes.append(dense.shape[1])
        lists, single = ids.columns
        assert len(ids) == len(single) == dense.shape[1]
        assert ids.lengths[0].tolist() == single.tolist() == dense[0].tolist()
        assert lists.tolist() == np.repeat(single, single).tolist()
        if 13 in single:
            raise MemoryError("thirteen")
        return dense[0]


@pytest.fixture
def batches() -> list[RequestBatch]:
    return []


def run(model: Model, batches: list, check) -> None:
    """Run ``check(batcher)`` on an event loop."""
    batcher = Batcher(batches.append, batch_rows=8)
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


def test_a_batch_that_fails_harms_no_other(batches: list) -> None:
    model = Model()
    model.go.release(100)

    async def check(batcher: Batcher) -> None:
        with pytest.raises(MemoryError, match="thirteen"):
            await batcher.score(model, request(13))
        assert (await batcher.score(model, request(2))).tolist() == [2]

    run(model, batches, check)
    assert len(batches) == 1


def test_small_requests_and_parts_of_large_ones_take_turns(batches: list) -> None:
    model = Model()

    async def check(batcher: Batcher) -> None:
        first = await _queued(batcher, model, request(5))
        await _taken(batcher)
        large = await _queued(batcher, model, *[request(*range(1, 9), *[1] * 72)] * 2)
        small = await _queued(batcher, model, *[request(*[2] * 8)] * 2)
        model.go.release(100)
        await asyncio.gather(*first, *large, *small)

    run(model, batches, check)
    sums = [int(batch.probabilities.sum()) for batch in batches]
    assert sums[:6] == [5, 36, 16, 8, 16, 8]
    assert len(sums) == 1 + 20 + 2


JSON = {"content-type": "application/json"}


async def _predict(
    service: Service, body: bytes, more: tuple[bytes, ...] = (), complete: bool = True
) -> tuple[int, dict, dict]:
    """Status, answer and headers of ``POST /predict``, without a socket."""
    sent: list[dict] = []
    parts = [{"type": "http.request", "body": part, "more_body": True} for part in (body, *more)]
    parts[-1]["more_body"] = not complete

    async def receive() -> dict:
        return parts.pop(0) if parts else await asyncio.get_running_loop().create_future()

    async def send(message: dict) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json; charset=utf-8")]
    path = {"path": "/predict", "raw_path": b"/predict", "query_string": b"", "root_path": ""}
    scope = {"type": "http", "method": "POST", "headers": headers, **path}
    await service(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"]), dict(sent[0]["headers"])


@pytest.fixture
def busy(shop_predictor: Predictor):
    """Makes services whose model waits until it is let go on; they end with the test."""
    services, go = [], threading.Event()

    class Busy(Predictor):
        def predict_parts(self, parts: Sequence[EncodedRows]) -> np.ndarray:
            assert go.wait(600)
            return super().predict_parts(parts)

    def make(**limits: float) -> tuple[Service, threading.Event]:
        predictor = Busy(shop_predictor.workflow, shop_predictor.model)
        services.append(Service(Served(predictor), ServerSettings(**limits)))
        return services[-1], go

    yield make
    go.set()
    for service in services:
        service.batcher.close()


def _rows(predictor: Predictor, count: int) -> bytes:
    columns = [column.name for column in (*predictor.spec.dense, *predictor.spec.categorical)]
    return json.dumps({"rows": [dict.fromkeys(columns)] * count}).encode()


def test_what_is_late_is_refused(busy, shop_predictor: Predictor) -> None:
    service, go = busy(timeout_s=0.05)
    body = _rows(shop_predictor, 1)

    async def check() -> None:
        status, answer, headers = await _predict(service, body[:5], complete=False)
        assert (status, headers[b"connection"]) == (408, b"close")
        assert answer["error"] == "the body was not complete within 0.05 s"
        status, answer, headers = await _predict(service, body[:5], (body[5:],))
        assert (status, headers[b"retry-after"]) == (503, b"1")
        assert answer["error"] == "not scored in time"
        go.set()
        service.batcher.close()

    asyncio.run(check())
    assert 'code="503"} 1.0' in service.metrics.render().decode()


def test_small_requests_are_the_last_that_a_full_queue_refuses(
    busy, shop_predictor: Predictor
) -> None:
    service, go = busy(max_waiting_rows=100, max_rows=50, timeout_s=100)

    def send(rows: int) -> asyncio.Task:
        return asyncio.create_task(_predict(service, _rows(shop_predictor, rows)))

    async def check() -> None:
        accepted, waiting = [send(1)], 0  # the model is busy with the first one
        while not service.metrics.in_flight._value.get() or service.batcher.waiting_rows:
            await asyncio.sleep(0)
        for rows in (50, 25, 12, 1):
            accepted.append(send(rows))
            waiting += rows
            while service.batcher.waiting_rows != waiting:
                await asyncio.sleep(0)
            status, answer, headers = await send((100 - waiting) // 2 + 1)
            assert (status, answer["error"]) == (503, "too many rows are waiting")
            assert headers[b"retry-after"] == b"1"
        go.set()
        answers = await asyncio.gather(*accepted)
        counts = [len(answer["probabilities"]) for _, answer, _ in answers]
        assert counts == [1, 50, 25, 12, 1]

    asyncio.run(check())


def test_what_is_not_finite_is_an_error(shop_predictor: Predictor) -> None:
    """The weights are damaged: the first row is named."""
    model = shop_predictor.model
    head = copy.deepcopy(model.head)
    next(head.module.parameters()).fill_(float("nan"))
    damaged = dataclasses.replace(model, head=head)
    service = Service(Served(Predictor(shop_predictor.workflow, damaged)), ServerSettings())
    status, answer, _ = asyncio.run(_predict(service, _rows(shop_predictor, 2)))
    assert status == 500
    assert answer["error"] == "the model computed the probability nan"
    assert answer["row"] == 0
    assert "weights" in answer["remedy"]
    page = service.metrics.render().decode()
    assert "inference_rows_total 2.0" in page
    assert "nan" not in page.lower()


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


@settings(max_examples=75, deadline=None)
@given(data=st.data(), count=st.sampled_from([1, 2, 130]), by_column=st.booleans())
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
        encoded, _ = parse_body(
            bytearray(json.dumps(value), "utf-8"),
            JSON,
            shop_predictor,
            ServerSettings(max_rows=200),
        )
    except RefusedError as error:
        refused.append((error.status, json.dumps(error.details)))
    if refused:
        assert refused[0][0] in (413, 422)
    else:
        assert np.isfinite(shop_predictor.predict_encoded(encoded.dense, encoded.ids)).all()
