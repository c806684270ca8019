"""The server's endpoints, the limits of a request, and the steps from a request to its answer."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from nvt_torchrec.base import __version__
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.freed_memory import release_memory
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.inference.predictor import Predictor, check_finite
from nvt_torchrec.inference.server import protocol
from nvt_torchrec.inference.server.batching import Batcher
from nvt_torchrec.inference.server.bodies import (
    Parsed,
    Parser,
    RefusedError,
    is_small,
    parse_body,
)
from nvt_torchrec.inference.server.prometheus import ServerMetrics
from nvt_torchrec.inference.server.reload import Reloader, Served
from nvt_torchrec.inference.server.serve_settings import ModelSource, ServerSettings

log = logging.getLogger(__name__)

_Parse: TypeAlias = Callable[[Predictor, ServerSettings], Parsed]

#: After a body of at least this size, free memory is returned to the system.
_LARGE_BODY_BYTES = 64 << 10
_PARSER_THREADS = 2
#: The memory for bodies, from their arrival to their answer, in bodies of the largest size.
_MAX_BODIES = 8
#: The rest of a body that is too large is read and dropped, up to this many times the limit. If the
#: connection were closed at once, a client that is still sending would not see the error.
_DROPPED_LIMITS = 4
#: The main endpoint. It is answered before Starlette's middleware and routing, which take as long
#: as the model takes for one row.
_PREDICT = "POST", "/predict"
#: Seconds between two updates of the gauges, which other workers may read at any time.
_GAUGES_S = 1.0


class Service:
    """An ASGI application that serves a model over HTTP and can replace it while it runs.

    A new model has the same columns and labels
    (:func:`inference.model.served_checkpoint.check_same_interface`), but everything else may
    differ. So a request reads ``served`` once and uses that model until its answer, and this object
    keeps no other reference to a model.

    Args:
        served: The model. The caller must not keep a reference, which would keep the model in
            memory after it has been replaced.
        settings: The limits of requests.

    Attributes:
        served: The model that scores the requests that arrive from now on.
        batcher: The queue in front of the model.
        metrics: The metrics.
        draining: True if the server is about to end, so that load balancers send no more requests.
    """

    def __init__(self, served: Served, settings: ServerSettings) -> None:
        self.served = served
        self.draining = False
        self._settings = settings
        columns = tuple(served.predictor.spec.categorical_names)
        self.metrics = ServerMetrics(columns, served.predictor.labels)
        self.batcher = Batcher(self.metrics.observe)
        self._parsers = ThreadPoolExecutor(_PARSER_THREADS, "parser")
        #: The size of all bodies that are in memory.
        self._body_bytes = 0
        #: True if a large body was read since free memory was last returned to the system.
        self._trim_due = False
        self._reloader: Reloader | None = None
        self._endpoints = _build_endpoints(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request; while draining, close the connection after its answer."""

        async def send_last(message: Message) -> None:
            if self.draining and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        if scope["type"] == "http" and (scope["method"], scope["path"]) == _PREDICT:
            response = await self.answer(Request(scope, receive), parse_body)
            await response(scope, receive, send_last)
        else:
            await self._endpoints(scope, receive, send_last)

    def follow(self, source: ModelSource) -> Reloader:
        """Watch the path of the bundle; serve each bundle that is put there from now on."""
        self.metrics.record_served(self.served)
        failed = self.metrics.reload_failures.inc
        self._reloader = Reloader(source, self.served, self.serve, failed)
        return self._reloader

    def serve(self, served: Served) -> None:
        """Serve a model from the next request on."""
        before = self.served
        self.served = served
        self.metrics.record_served(served, before)
        self.metrics.reloads.inc()

    def drain(self, end: Callable[[], object]) -> None:
        """Ask clients to use other servers; call ``end`` once they have had the time to do so.

        A second call does not wait.
        """
        seconds = 0.0 if self.draining else self._settings.drain_s
        self.draining = True
        asyncio.get_running_loop().call_later(seconds, end)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Start the background task; stop all threads after the last request was answered."""
        task = asyncio.create_task(self._set_gauges())
        yield
        task.cancel()
        if self._reloader is not None:
            self._reloader.close()
        self.batcher.close()

    async def _set_gauges(self) -> None:
        """Update gauges every second, and return free memory to the system after large bodies."""
        while True:
            if self._trim_due and not self._body_bytes:
                self._trim_due = False
                release_memory()
            self.metrics.queue_rows.set(self.batcher.waiting_rows)
            await asyncio.sleep(_GAUGES_S)

    async def answer(self, request: Request, parser: Parser) -> Response:
        """Answer a request for probabilities, and count the answer."""
        begin = time.perf_counter()
        try:
            response = await self._score_in_time(request, parser)
        except RefusedError as error:
            response = error.answer()
        except ClickLogError as error:  # the batcher has logged it, once for the whole batch
            response = RefusedError(500, error.what, remedy=error.remedy).answer()
        except ClientDisconnect:  # no client will read the answer
            return Response(status_code=400)
        except Exception:
            log.exception("a request could not be answered")
            response = RefusedError(500, "internal error", remedy="see the server's log").answer()
        self.metrics.count_answer(response.status_code, time.perf_counter() - begin)
        return response

    async def _score_in_time(self, request: Request, parser: Parser) -> Response:
        """Read and score a request within the time limit. Raises RefusedError."""
        seconds = self._settings.timeout_s
        body = bytearray()
        complete = False
        try:
            async with asyncio.timeout(seconds):
                await self._read_body(request, body)
                complete = True
                with self.metrics.in_flight.track_inprogress():
                    return await self._score(
                        functools.partial(parser, body, request.headers), is_small(body)
                    )
        except TimeoutError:
            if complete:
                raise RefusedError(503, "not scored in time", remedy="try again later") from None
            raise RefusedError(408, f"the body was not complete within {seconds:g} s") from None
        finally:
            self._body_bytes -= len(body)

    async def _read_body(self, request: Request, body: bytearray) -> None:
        """Append the parts of a request's body to ``body`` as they arrive.

        Raises:
            RefusedError: The body is too large or compressed, or too many bodies are in memory.
        """
        limit = self._settings.max_body_bytes
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > _DROPPED_LIMITS * limit:
                break
            if size > limit:
                continue
            body += part
            self._body_bytes += len(part)
            self._trim_due |= len(body) >= _LARGE_BODY_BYTES
            # A body may fill half of the memory that others leave, so that small ones still fit.
            others = self._body_bytes - len(body)
            if 2 * len(body) > _MAX_BODIES * limit - others:
                raise RefusedError(503, "too many bodies are being read", remedy="try again later")
        if size > limit:
            raise RefusedError(
                413,
                f"a body of more than {limit} bytes",
                remedy="send fewer rows in a request, or raise the server's --max_body_mb",
            )
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            remedy = "send uncompressed bodies"
            raise RefusedError(415, f"content encoding {encoding!r:.60}", remedy=remedy)

    async def _score(self, parse: _Parse, small: bool) -> Response:
        """Parse a body, score its rows and return the answer. Raises RefusedError."""
        # The bundle may be replaced during this call, but rows must be scored by the model for
        # which they were encoded.
        served = self.served
        if small:
            # Waking a thread would take longer than parsing.
            parsed = self._parse(parse, served.predictor)
        else:
            loop = asyncio.get_running_loop()
            parsed = await loop.run_in_executor(self._parsers, self._parse, parse, served.predictor)
        if isinstance(parsed, Response):
            return parsed
        rows, respond = parsed
        self._check_queue(len(rows))
        model = served.predictor.predict_parts
        probabilities = await self.batcher.score(model, rows, at_once=served.is_quick)
        try:
            check_finite(probabilities)
        except InvalidRowError as error:
            log.error("%s", error.what)
            raise RefusedError(500, error.reason, row=error.row, remedy=error.remedy) from None
        response = respond(probabilities)
        response.raw_headers += served.raw_headers
        return response

    def _parse(self, parse: _Parse, predictor: Predictor) -> Parsed | Response:
        """Return the rows, or the answer that refuses them.

        RefusedError does not leave this function: its traceback refers to all values of the body,
        and would keep them in memory until the next garbage collection.
        """
        try:
            self._check_queue(1)  # under overload, refuse a request before parsing it
            return parse(predictor, self._settings)
        except RefusedError as error:
            return error.answer()

    def _check_queue(self, rows: int) -> None:
        """Refuse a request that needs more than half of the space left in the queue.

        So there is still space for small requests when there is none for large ones.

        Raises:
            RefusedError: The request has too many rows.
        """
        if 2 * rows > self._settings.max_waiting_rows - self.batcher.waiting_rows:
            raise RefusedError(503, "too many rows are waiting", remedy="try again later")


async def _refuse_method(request: Request) -> Response:
    raise AssertionError("answered by Service.__call__")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return error.answer()


def _build_endpoints(service: Service) -> Starlette:
    """Build the application of all endpoints except ``POST /predict``."""

    async def version(request: Request) -> Response:
        served = service.served
        about = {
            "nvt-torchrec": __version__,
            "bundle": served.bundle or None,
            "generation": served.generation,
            "workflow": served.predictor.workflow.digest,
        }
        return JSONResponse(about, headers=served.headers)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        status = "draining" if service.draining else "ready"
        return JSONResponse({"status": status}, 503 if service.draining else 200)

    async def metrics_page(request: Request) -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    routes = [
        # Makes Starlette answer 405 to other methods; POST is answered before routing.
        Route("/predict", _refuse_method, methods=["POST"]),
        Route("/version", version),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics_page),
        *protocol.make_routes(service),
    ]
    return Starlette(
        routes=routes, lifespan=service.lifespan, exception_handlers={RefusedError: _refuse}
    )
