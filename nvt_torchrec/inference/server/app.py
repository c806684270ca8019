"""The endpoints of the server, the limits of a request, and its way to the model."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from nvt_torchrec import __version__
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.validation import strict_json
from nvt_torchrec.clicklog.in_memory.errors import InvalidRowError, MissingColumnError
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.inference.predictor import Predictor, check_finite
from nvt_torchrec.inference.server.batching import Batcher
from nvt_torchrec.inference.server.metrics import ServerMetrics
from nvt_torchrec.inference.server.openapi import ERRORS, Probabilities, request_body
from nvt_torchrec.inference.server.reload import Reloader, Served
from nvt_torchrec.inference.server.settings import ServerSettings, Source
from nvt_torchrec.workflows.compiled.workflow import EncodedRows

log = logging.getLogger(__name__)

#: Bodies of this size or more are parsed in threads, so that they do not block the event loop.
_LARGE_BODY_BYTES = 64 << 10
_PARSER_THREADS = 2
#: Seconds between two times at which gauges are set, which any worker may read at any time.
_GAUGES_S = 1.0


class RefusedError(Exception):
    """A request is answered with an error.

    Attributes:
        status: The HTTP status.
        details: The JSON object of the answer.
    """

    def __init__(self, status: int, error: str, **details: Any) -> None:
        super().__init__(error)
        self.status, self.details = status, {"error": error, **details}

    def answer(self) -> Response:
        """Return the answer."""
        headers = {"Retry-After": "1"} if self.status == 503 else {}
        if self.status in (408, 413):  # the rest of the request is not read
            headers["Connection"] = "close"
        body = json.dumps(self.details)  # ASCII: half a surrogate pair cannot be encoded as UTF-8
        return Response(body, self.status, headers, media_type="application/json")


class Service:
    """A model that is served over HTTP.

    A model that is put in its place later has the same columns
    (:func:`inference.model.weights.check_same_columns`). All else may differ, so a request
    takes ``served`` once, and nothing here keeps the first one.

    Args:
        served: The model. The caller must not keep it, so that its successor can replace it.
        settings: The limits of requests.

    Attributes:
        served: The model that scores requests that arrive from now on.
        batcher: The queue in front of the model.
        metrics: The metrics.
        draining: Whether the server is about to end, so that balancers send no more requests.
    """

    def __init__(self, served: Served, settings: ServerSettings) -> None:
        self.served, self._settings, self.draining = served, settings, False
        self.metrics = ServerMetrics(tuple(served.predictor.spec.categorical_names))
        watch, workflow = self.metrics.drift.watch, served.predictor.workflow
        threading.Thread(target=watch, args=(workflow,), name="drift", daemon=True).start()
        self.batcher = Batcher(self.metrics.observe)
        self._parsers = ThreadPoolExecutor(_PARSER_THREADS, "parser")
        self._reloader: Reloader | None = None
        self._fastapi = _endpoints(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI defines it; while draining, close its connection after it."""

        async def send_last(message: Message) -> None:
            if self.draining and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._fastapi(scope, receive, send_last)

    def follow(self, source: Source) -> Reloader:
        """Serve each further bundle that is put in the place of the one that is served."""
        self.metrics.serves(self.served)
        failed = self.metrics.reload_failures.inc
        self._reloader = Reloader(source, self.served, self.serve, failed)
        return self._reloader

    def serve(self, served: Served) -> None:
        """Serve a model from the next request on, and measure drift from its workflow's values."""
        before, self.served = self.served, served
        self.metrics.drift.watch(served.predictor.workflow)
        self.metrics.serves(served, before)
        self.metrics.reloads.inc()

    def drain(self, end: Callable[[], object]) -> None:
        """Ask clients to go elsewhere, and call ``end`` when they had time to; at once if again."""
        seconds = 0.0 if self.draining else self._settings.drain_s
        self.draining = True
        asyncio.get_running_loop().call_later(seconds, end)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Run until the server has answered its last request."""
        setting = asyncio.create_task(self._set_gauges())
        yield
        setting.cancel()
        if self._reloader is not None:
            self._reloader.close()
        self.batcher.close()

    async def _set_gauges(self) -> None:
        while True:
            self.metrics.queue_rows.set(self.batcher.waiting_rows)
            self.metrics.drift.set_gauges()
            await asyncio.sleep(_GAUGES_S)

    async def answer(self, request: Request) -> Response:
        """Answer ``POST /predict``, and count the answer."""
        begin = time.perf_counter()
        try:
            response = await self._score_in_time(request)
        except RefusedError as error:
            response = error.answer()
        except ClientDisconnect:  # nobody reads an answer
            return Response(status_code=400)
        except Exception:
            log.exception("a request could not be answered")
            response = RefusedError(500, "internal error", remedy="see the server's log").answer()
        self.metrics.answered(response.status_code, time.perf_counter() - begin)
        return response

    async def _score_in_time(self, request: Request) -> Response:
        seconds = self._settings.timeout_s
        error = RefusedError(408, f"the body was not complete within {seconds:g} s")
        try:
            async with asyncio.timeout(seconds):
                body = await self._read_body(request)
                error = RefusedError(503, "not scored in time", remedy="try again later")
                with self.metrics.under_way.track_inprogress():
                    return await self._score(body)
        except TimeoutError:
            raise error from None

    async def _read_body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RefusedError(415, f"content type {kind!r}", remedy="send application/json")
        limit, body = int(self._settings.max_body_mb * 2**20), bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise RefusedError(
                    413,
                    f"a body of more than {limit} bytes",
                    remedy="send fewer rows in a request, or raise the server's --max_body_mb",
                )
        return bytes(body)

    async def _score(self, body: bytes) -> Response:
        now = self.served
        if len(body) < _LARGE_BODY_BYTES:
            rows = self._parse(body, now.predictor)
        else:
            loop = asyncio.get_running_loop()
            rows = await loop.run_in_executor(self._parsers, self._parse, body, now.predictor)
        self._check_queue(len(rows))
        probabilities = await self.batcher.score(now.predictor.predict_encoded, rows)
        try:
            check_finite(probabilities)
        except InvalidRowError as error:
            log.error("%s", error.what)
            raise RefusedError(500, error.reason, row=error.row, remedy=error.remedy) from None
        content = json.dumps({"probabilities": probabilities.tolist()}, allow_nan=False)
        return Response(content, media_type="application/json", headers=now.headers)

    def _parse(self, body: bytes, predictor: Predictor) -> EncodedRows:
        self._check_queue(1)  # under overload, refuse before the work of parsing
        return parse_body(body, predictor, self._settings.max_rows)

    def _check_queue(self, rows: int) -> None:
        """Refuse rows that are more than half of the room left, so that small requests have some.

        Raises:
            RefusedError: There are too many rows.
        """
        if 2 * rows > self._settings.max_waiting_rows - self.batcher.waiting_rows:
            raise RefusedError(503, "too many rows are waiting", remedy="try again later")


def _endpoints(service: Service) -> FastAPI:
    app = FastAPIOffline(
        title="Click probabilities",
        description="Raw rows → probabilities, by the workflow and the model of one training run.",
        lifespan=service.lifespan,
        redoc_url=None,
        swagger_ui_parameters={"validatorUrl": None},
    )

    @app.post(
        "/predict",
        summary="Score raw rows",
        response_model=Probabilities,
        response_description="A probability for each row, in their order",
        responses=ERRORS,
        openapi_extra={"requestBody": request_body(service.served.predictor.spec)},
    )
    async def predict(request: Request) -> Response:
        """Missing values are null. Columns that the model does not use are ignored.

        Rows are a list of objects (`rows`), or an object with a list for each column (`columns`),
        which is faster for many rows.
        """
        return await service.answer(request)

    @app.get("/version", summary="What answers")
    async def version(response: Response) -> dict[str, Any]:
        now = service.served
        response.headers.update(now.headers)
        return {
            "nvt-torchrec": __version__,
            "bundle": now.bundle or None,
            "generation": now.generation,
            "workflow": now.predictor.workflow.digest,
        }

    @app.get("/health", summary="Whether the process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", summary="Whether to send requests")
    async def ready(response: Response) -> dict[str, str]:
        if service.draining:
            response.status_code = 503
        return {"status": "draining" if service.draining else "ready"}

    @app.get("/metrics", summary="Metrics for Prometheus")
    async def metrics_page() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("docs")

    return app


def parse_body(body: bytes, predictor: Predictor, max_rows: int) -> EncodedRows:
    """Return the encoded rows of a request's JSON.

    Raises:
        RefusedError: The body is not valid, breaks the feature spec, or has more than ``max_rows``.
    """
    try:
        value = strict_json(body)
    except ValueError as error:
        raise RefusedError(400, f"not JSON: {error}") from None
    rows = _rows(value, max_rows)
    try:
        if b"true" in body or b"false" in body:
            _refuse_booleans(rows, predictor.spec)
        return predictor.workflow.transform(predictor.read(rows))
    except (InvalidRowError, MissingColumnError) as error:
        known = {key: getattr(error, key) for key in ("row", "column", "reason", "remedy")}
        where = {key: value for key, value in known.items() if value not in (None, "")}
        raise RefusedError(422, "invalid row", **where) from None
    except SchemaError as error:
        raise RefusedError(422, error.what, remedy=error.remedy) from None


def _refuse_booleans(rows: list[dict] | dict[str, list], spec: FeatureSpec) -> None:
    """Refuse true and false in columns of other raw types: to Python they are the numbers 1 and 0.

    Raises:
        InvalidRowError: There is one.
    """
    for read in spec.read_plan(label=False).reads:
        name, reason = read.source, RAW_TYPES[read.raw].syntax
        values = rows.get(name, ()) if isinstance(rows, dict) else [row.get(name) for row in rows]
        for i, value in enumerate(values if read.raw != "bool" else ()):
            if bool in map(type, value if isinstance(value, list) else [value]):
                raise InvalidRowError(i, name, f"{value!r:.60}: {reason}", "true is 1, false 0")


def _rows(value: Any, max_rows: int) -> list[dict] | dict[str, list]:
    match value:
        case {"rows": list(rows), **others} if not others:
            count = len(rows)
            for index, row in enumerate(rows):
                if not isinstance(row, dict):
                    raise RefusedError(422, "invalid row", row=index, reason="not an object")
        case {"columns": dict(rows), **others} if not others:
            if not all(isinstance(values, list) for values in rows.values()):
                raise RefusedError(422, "a column of 'columns' is not a list")
            count = max(map(len, rows.values()), default=0)
        case _:
            raise RefusedError(
                422, "the body is not an object with either a list 'rows' or an object 'columns'"
            )
    if count > max_rows:
        raise RefusedError(
            413,
            f"{count} rows; the limit is {max_rows}",
            remedy="send them in several requests, or raise the server's --max_rows",
        )
    return rows
