"""The endpoints of the server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from nvt_torchrec import __version__
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.atomic import unique_keys
from nvt_torchrec.inference.inputs.values import InvalidRowError, MissingColumnError
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.access import Access, AccessLog, ApiKeys, request_of
from nvt_torchrec.inference.server.admission import PREDICT, Admission
from nvt_torchrec.inference.server.answers import RefusedError
from nvt_torchrec.inference.server.batching import Batcher
from nvt_torchrec.inference.server.fairness import Turns
from nvt_torchrec.inference.server.metrics import ServerMetrics
from nvt_torchrec.inference.server.openapi import ERRORS, Probabilities, request_body
from nvt_torchrec.inference.server.served import Served
from nvt_torchrec.inference.server.settings import ServerSettings
from nvt_torchrec.workflows.compiled.workflow import EncodedRows

log = logging.getLogger(__name__)

#: Bodies of this size or more are parsed in a thread, so that they do not block the event loop.
_LARGE_BODY_BYTES = 64 << 10
_PARSER_THREADS = 2


@dataclasses.dataclass
class Service:
    """An application and its parts.

    Attributes:
        app: The ASGI application.
        served: The model that scores requests that arrive from now on.
        batcher: The queue in front of the model.
        metrics: The metrics.
        draining: Whether the server is about to end, so that load balancers send no more requests.
    """

    app: ASGIApp
    served: Served
    batcher: Batcher
    metrics: ServerMetrics
    draining: bool = False

    def serve(self, served: Served) -> None:
        """Serve a model from the next request on, and measure drift from its workflow's values."""
        watching = self.metrics.drift.watch(served.predictor.workflow)
        self.served = served
        watching.join()


def make_service(
    served: Served,
    settings: ServerSettings,
    keys: ApiKeys | None = None,
    access_log: AccessLog | None = None,
) -> Service:
    """Make the application that serves a model, and start the model's thread.

    A model that is put in its place later has the same columns
    (:func:`inference.inputs.successors.check_same_columns`). All else may differ, so a request
    takes ``service.served`` once, and nothing here keeps the first one.
    """
    spec = served.predictor.spec
    metrics = ServerMetrics(spec.categorical_names, settings.drift_window_s)
    metrics.drift.watch(served.predictor.workflow)
    batcher = Batcher(
        batch_rows=settings.batch_rows,
        delay=settings.batch_delay_ms / 1e3,
        observe=metrics.observe,
    )
    turns = Turns(_PARSER_THREADS)

    async def parse_in_thread(body: bytes, predictor: Predictor, client: str) -> EncodedRows:
        await turns.acquire(client, len(body))
        release = partial(asyncio.get_running_loop().call_soon_threadsafe, turns.release)
        try:
            job = _in_thread(lambda: parse_body(body, predictor, settings.max_rows))
        except BaseException:  # the thread could not be started
            turns.release()
            raise
        job.add_done_callback(lambda _: release())
        return await asyncio.wrap_future(job)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        batcher.close()

    app = FastAPIOffline(
        title="Click probabilities",
        description="Raw rows → probabilities, by the workflow and the model of one training run.",
        lifespan=lifespan,
        redoc_url=None,
        swagger_ui_parameters={"validatorUrl": None},
    )

    @app.post(
        PREDICT,
        summary="Score raw rows",
        response_model=Probabilities,
        response_description="A probability for each row, in their order",
        responses=ERRORS,
        openapi_extra={"requestBody": request_body(spec)},
    )
    async def predict(request: Request) -> Response:
        """Missing values are null. Columns that the model does not use are ignored.

        Rows are a list of objects (`rows`), or an object with a list for each column (`columns`),
        which is faster for many rows.
        """
        body, context = await request.body(), request_of(request.scope)
        now = service.served
        if len(body) < _LARGE_BODY_BYTES:
            rows = parse_body(body, now.predictor, settings.max_rows)
        else:
            rows = await parse_in_thread(body, now.predictor, context.client)
        probabilities = await batcher.score(now.predictor.predict_encoded, rows, context.client)
        check_finite(probabilities)
        context.rows = len(rows)
        content = json.dumps({"probabilities": probabilities.tolist()}, allow_nan=False)
        return Response(content, media_type="application/json", headers=now.headers)

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
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("docs")

    _handle_errors(app)
    admission = Admission(app, settings, metrics)
    service = Service(Access(admission, metrics, keys, access_log), served, batcher, metrics)
    metrics.gauge(
        "inference_requests_under_way",
        "Requests accepted and not yet answered",
        lambda: admission.requests,
    )
    metrics.gauge(
        "inference_queue_rows", "Rows waiting for the model", lambda: batcher.waiting_rows
    )
    return service


def _in_thread(work: Callable[[], EncodedRows]) -> Future[EncodedRows]:
    """Run ``work`` in a daemon thread; unlike those of an executor, it does not delay the end."""
    job: Future[EncodedRows] = Future()
    job.set_running_or_notify_cancel()

    def do() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    threading.Thread(target=do, name="parser", daemon=True).start()
    return job


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> Response:
        _, body = error.content()  # ASCII: half a surrogate pair could not be encoded as UTF-8
        return Response(body, error.status, media_type="application/json")

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "internal error", "remedy": "see the server's log"}, 500)


def parse_body(body: bytes, predictor: Predictor, max_rows: int) -> EncodedRows:
    """Return the encoded rows of a request's JSON.

    Raises:
        RefusedError: The body is not valid, breaks the feature spec, or has more than ``max_rows``.
    """
    try:
        value = json.loads(body, object_pairs_hook=unique_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"not JSON: {error}") from None
    rows = _rows(value, max_rows)
    try:
        return predictor.workflow.transform(predictor.read(rows))
    except InvalidRowError as error:
        where = {"row": error.row, "column": error.column, "reason": error.reason}
        if error.remedy:
            where["remedy"] = error.remedy
        raise RefusedError(422, "invalid row", **where) from None
    except MissingColumnError as error:
        where = {"column": error.column, "reason": "the column is missing"}
        if error.row is not None:
            where = {"row": error.row, **where}
        raise RefusedError(422, "invalid row", **where, remedy=error.remedy) from None
    except SchemaError as error:
        raise RefusedError(422, error.what, remedy=error.remedy) from None


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON; a missing value is null")


def check_finite(probabilities: np.ndarray) -> None:
    """Raise RefusedError if a probability is NaN or infinite, which JSON cannot express."""
    finite = np.isfinite(probabilities)
    if not finite.all():
        row = int(finite.argmin())
        log.error("the model computed the probability %s", probabilities[row])
        raise RefusedError(
            500,
            f"the model computed the probability {probabilities[row]}",
            row=row,
            remedy="its weights, or a dense value of the row, are too large or not finite: "
            "compare with `python -m inference predict`",
        )


def _rows(value: Any, max_rows: int) -> list[dict] | dict[str, list]:
    if not isinstance(value, dict) or set(value) not in ({"rows"}, {"columns"}):
        raise RefusedError(422, "the body is not an object with either 'rows' or 'columns'")
    if "rows" in value:
        rows = value["rows"]
        if not isinstance(rows, list):
            raise RefusedError(422, "'rows' is not a list")
        _check_count(len(rows), max_rows)
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                raise RefusedError(422, "invalid row", row=index, reason="not an object")
        return rows
    columns = value["columns"]
    if not isinstance(columns, dict):
        raise RefusedError(422, "'columns' is not an object")
    for name, values in columns.items():
        if not isinstance(values, list):
            raise RefusedError(422, "invalid column", column=name, reason="not a list")
        _check_count(len(values), max_rows)
    return columns


def _check_count(rows: int, max_rows: int) -> None:
    if rows > max_rows:
        raise RefusedError(
            413,
            f"{rows} rows; the limit is {max_rows}",
            remedy="send them in several requests, or raise the server's --max_rows",
        )
