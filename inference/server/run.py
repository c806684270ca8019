"""From a predictor to a process that listens, and that ends well."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import math
import multiprocessing
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from clicklog.errors import SettingsError
from inference.predictor import Predictor
from inference.server.access import AccessLog, ApiKeys
from inference.server.app import Service, make_service
from inference.server.connections import Connection, Connections
from inference.server.logs import ALWAYS, keep_short
from inference.server.settings import ServerSettings
from inference.server.sockets import (
    ACCEPT_AT_ONCE,
    BACKLOG,
    connection_limit,
    load_certificate,
    refuse_new,
    tls_context,
)

log = logging.getLogger(__name__)

#: Seconds a thread may keep the interpreter. Python's 5 ms are longer than a request takes, and the
#: model's thread needs the interpreter between any two kernels.
_SWITCH_S = 0.0005
#: Seconds that open connections are left for one more request, once no new ones are accepted.
_GRACE_S = 1.0
#: Seconds that connections have to be accepted in once no new ones begin.
_ACCEPT_S = 0.1


def serve(
    predictor: Predictor,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    started: Callable[[], object],
    alone: Callable[[], bool] = lambda: True,
) -> None:
    """Serve until SIGTERM or SIGINT, then answer what was accepted.

    Args:
        predictor: what scores.
        settings: the limits.
        listener: where connections come from.
        started: called when it answers.
        alone: asked at the end: whether nobody else goes on listening at this socket.

    Raises:
        SettingsError: a file that the settings name cannot be used.
    """
    keys = ApiKeys(settings.api_key_file) if settings.api_key_file else None
    tls = tls_context(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    _warm_up(predictor)
    service = make_service(
        predictor, settings, keys, AccessLog(sys.stdout) if settings.access_log else None
    )
    if settings.otel:
        from inference.server.telemetry import traced

        service.app = traced(service.app)
    keep_short()
    config = uvicorn.Config(
        service.app,
        log_config=None,
        access_log=False,
        loop="asyncio",  # uvloop takes up one connection between requests: under load some starve
        http=Connection,
        server_header=False,
        ws="none",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_keep_alive=math.ceil(settings.idle_s),
        # limits of our own are stricter; this one is for connections that never end
        timeout_graceful_shutdown=math.ceil(settings.timeout_s) + 5,
        ssl_context_factory=(lambda *_: tls) if tls else None,
    )
    sys.setswitchinterval(_SWITCH_S)
    # when it has ended, uvicorn raises the signal again for whoever handled it before
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if settings.reloads:
        signal.signal(signal.SIGHUP, lambda *_: _reload(settings, keys, tls))
    connections = Connections(settings, service.metrics, connection_limit(settings))
    _Server(config, service, connections, settings, started, alone).run(sockets=[listener])


def _reload(settings: ServerSettings, keys: ApiKeys | None, tls) -> None:
    if keys:
        keys.reload()
    if tls:
        try:
            # first elsewhere: a context that a pair does not fit into has none afterwards
            tls_context(settings.tls_cert, settings.tls_key)
            load_certificate(tls, settings.tls_cert, settings.tls_key)
        except SettingsError as error:
            log.error("the certificate is still the one from before: %s", error, extra=ALWAYS)


def _warm_up(predictor: Predictor) -> None:
    """Score rows without values, few and many, so that the first request is no slower."""
    row = dict.fromkeys(
        column.name for column in (*predictor.spec.dense, *predictor.spec.categorical)
    )
    for count in (1, 64):
        predictor.predict([row] * count)
    gc.collect()
    gc.freeze()  # what is there now stays: no need to look through it again and again


class _Server(uvicorn.Server):
    """Uvicorn's, with limited connections, which drains before it ends."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        connections: Connections,
        settings: ServerSettings,
        started: Callable[[], object],
        alone: Callable[[], bool],
    ) -> None:
        super().__init__(config)
        self._service, self._connections, self._settings = service, connections, settings
        self._started, self._alone = started, alone
        self._loop: asyncio.AbstractEventLoop | None = None
        service.metrics.gauge(
            "inference_connections", "Connections that are open", lambda: connections.count
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        self._loop = asyncio.get_running_loop()
        make = functools.partial(
            Connection,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            connections=self._connections,
        )
        self.servers = []
        for listener in sockets or ():
            server = await self._loop.create_server(
                make,
                sock=listener,
                ssl=self.config.ssl,
                ssl_handshake_timeout=self._settings.timeout_s if self.config.ssl else None,
                backlog=ACCEPT_AT_ONCE,
            )
            listener.listen(BACKLOG)  # asyncio takes one number for both
            self.servers.append(server)
        self.started = True
        self._started()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # every second
            self._connections.sweep(time.monotonic())
            self._service.metrics.share()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain()
        self._service.batcher.hurry()
        await self._accept_no_more(sockets or [])
        end = time.monotonic() + _GRACE_S
        while self._connections.count and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets=sockets)

    async def _accept_no_more(self, listeners: list[socket.socket]) -> None:
        if self._alone():
            for listener in listeners:
                refuse_new(listener)
            poll = select.poll()
            for listener in listeners:
                poll.register(listener, select.POLLIN)
            end = time.monotonic() + _GRACE_S
            await asyncio.sleep(_ACCEPT_S)
            while poll.poll(0) and time.monotonic() < end:
                await asyncio.sleep(0)
        for server in self.servers:
            for listener in server.sockets:
                self._loop.remove_reader(listener.fileno())
        await asyncio.sleep(_ACCEPT_S)  # for those that have been accepted to become connections
        for server in self.servers:
            server.close()

    def _drain(self) -> None:
        self._service.draining = True
        self._connections.drain()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT and multiprocessing.parent_process() is not None:
            return  # Ctrl-C reaches the parent, too, which says stop
        first, self._service.draining = not self._service.draining, True
        drain_s = self._settings.drain_s
        if not (first and drain_s and sig == signal.SIGTERM and self._loop):
            super().handle_exit(sig, frame)
            return
        log.info("draining for %g s", drain_s)
        end = super().handle_exit
        self._loop.call_soon_threadsafe(self._drain)
        self._loop.call_soon_threadsafe(
            lambda: self._loop.call_later(drain_s, lambda: end(sig, frame))
        )
