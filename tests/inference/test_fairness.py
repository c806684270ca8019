"""Clients take turns: in the queue before the model, for what is accepted, and for threads."""

from __future__ import annotations

import asyncio
import json

import pytest
from nvt_torchrec.inference.server.access import Request
from nvt_torchrec.inference.server.admission import Admission, WaitEstimate
from nvt_torchrec.inference.server.fairness import FairQueue, Turns, client_of

from nvt_torchrec.inference.server.metrics import ServerMetrics
from nvt_torchrec.inference.server.settings import ServerSettings
from tests.inference.test_batching import Model, _queued, _taken, request, run


def test_what_a_client_is() -> None:
    assert client_of("192.0.2.7") == client_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert client_of("2001:db8:0:1::1") != client_of("2001:db8::1")
    assert client_of("unix:") == "unix:"


def test_a_queue_gives_each_client_its_share() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(4):
        queue.put(f"big{i}", "big", 1024)
    assert queue.pop() == "big0"
    for i in range(5):
        queue.put(f"small{i}", "small", 1)
    for i in range(2):
        queue.put(f"other{i}", "other", 600)
    order = [queue.pop() for _ in range(len(queue))]
    assert [name for name in order if name.startswith("small")] == [f"small{i}" for i in range(5)]
    assert order.index("small4") < order.index("big1")
    assert order[-4:] == ["other1", "big1", "big2", "big3"]
    queue.put("again", "big", 1)  # who has waited before is not put back for it
    queue.put("later", "small", 1)
    assert (queue.first(), queue.pop(), queue.pop(), len(queue)) == ("again", "again", "later", 0)


def test_a_queue_forgets_clients() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.put(-1, "one", 1e9)
    for i in range(5000):
        queue.put(i, f"client {i}", 1)
        queue.pop()
    assert len(queue._ends) < 1100


def test_few_rows_do_not_wait_for_many() -> None:
    """A client's request for several batches goes in parts, and others between them."""
    model, batches = Model(), []

    async def check(batcher) -> None:
        first = await _queued(batcher, model, request(1))
        await _taken(batcher)
        many = [request(*range(12)) for _ in range(3)]
        big = [asyncio.create_task(batcher.score(model, rows, "big")) for rows in many]
        await asyncio.sleep(0)
        small = [asyncio.create_task(batcher.score(model, request(5), "small")) for _ in range(3)]
        await asyncio.sleep(0)
        model.go.release(100)
        answers = await asyncio.gather(*first, *small, *big)
        assert [answer.tolist() for answer in answers[1:4]] == [[5.0]] * 3
        assert [answer.tolist() for answer in answers[4:]] == [list(range(12))] * 3

    run(model, batches, check)
    assert model.sizes == [1, 8, 7, 8, 4, 8, 4]  # 7: the three, and what was left of the first
    assert [int(value) for value in batches[2].probabilities[:3]] == [5, 5, 5]


def test_nobody_waits_for_the_work_of_another() -> None:
    pace = WaitEstimate()
    pace.begin("a", 1000, 0.0)
    pace.end("a", 1000, 1.0, done=True)  # 1000 bytes/s
    pace.begin("a", 9000, 2.0)
    assert (pace.wait("a"), pace.wait("b")) == (9.0, 0.0)
    pace.begin("b", 500, 2.0)
    assert (pace.wait("a"), pace.wait("b"), pace.wait("c")) == (9.5, 1.0, 0.0)


class _Asgi:
    """An application that answers when it is told to, and requests to an Admission before it."""

    def __init__(self, **limits: float) -> None:
        self.go = asyncio.Event()
        self.admission = Admission(
            self._app, ServerSettings(timeout_s=100, **limits), ServerMetrics(("a",))
        )

    async def _app(self, scope, receive, send) -> None:
        await receive()
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(self, client: str, *parts: bytes | None) -> tuple[int, dict]:
        """Status and answer to a body; None: the rest never comes."""
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}
        scope["inference.request"] = Request("", client)
        left = list(parts)
        sent: list[dict] = []

        async def receive() -> dict:
            if left[0] is None:
                await asyncio.get_running_loop().create_future()
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        async def send(message: dict) -> None:
            sent.append(message)

        await self.admission(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    def start(self, client: str, *parts: bytes | None) -> asyncio.Task:
        return asyncio.create_task(self.ask(client, *parts))


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_newcomer_gets_the_place_of_who_has_most() -> None:
    async def check() -> None:
        asgi = _Asgi(max_requests=4)
        crowd = [asgi.start("crowd", b"{}") for _ in range(4)]
        await _settle()
        assert (await asgi.ask("crowd", b"{}"))[0] == 503  # its own are as many as there may be
        first = asgi.start("a", b"{}")
        await _settle()
        assert [one.done() for one in crowd] == [False, False, False, True]
        assert (await crowd[3])[1]["error"] == "too many requests are waiting"
        second = asgi.start("a", b"{}")
        await _settle()
        assert [one.done() for one in crowd] == [False, False, True, True]
        assert (await asgi.ask("a", b"{}"))[0] == 503  # two and two is fair
        asgi.go.set()
        assert [(await one)[0] for one in (first, second, *crowd[:2])] == [200] * 4
        assert asgi.admission.requests == 0

    asyncio.run(check())


def test_bodies_that_do_not_come_and_large_ones_leave_place_for_others() -> None:
    async def check() -> None:
        asgi = _Asgi(max_requests=1, max_body_mb=1)
        asgi.go.set()
        mib = b" " * (2**20 - 1)
        held = [asgi.start("slow", mib, None) for _ in range(20)]
        await _settle()
        assert sum(one.done() for one in held) >= 15  # 503: it holds half of the memory
        assert {one.result()[0] for one in held if one.done()} == {503}
        assert (await asgi.ask("other", mib))[0] == 200
        assert (await asgi.ask("slow", b"{}"))[0] == 200  # a small one holds none of it
        for one in held:
            one.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert not asgi.admission._bytes

    asyncio.run(check())


@pytest.mark.parametrize("cancelled", [False, True])
def test_threads_are_taken_in_turn(cancelled: bool) -> None:
    async def check() -> None:
        turns, order = Turns(1), []

        async def work(client: str, cost: int) -> None:
            await turns.acquire(client, cost)
            order.append(client)
            turns.release()

        await turns.acquire("big", 100)
        tasks = [asyncio.create_task(work("big", 100)) for _ in range(3)]
        await _settle()
        tasks += [asyncio.create_task(work("small", 1))]
        await _settle()
        if cancelled:  # when it is its turn already
            turns.release()
            tasks[0].cancel()
        else:
            turns.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["big", "small", "big", "big"][cancelled:]
        assert turns._free == 1

    asyncio.run(check())
