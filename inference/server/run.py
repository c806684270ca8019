"""The process that serves a predictor: its start, its reload and its orderly end."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import multiprocessing
import select
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.inference.server.access import AccessLog, ApiKeys
from nvt_torchrec.inference.server.app import Service, make_service
from nvt_torchrec.inference.server.connections import Connection, Connections
from nvt_torchrec.inference.server.logs import ALWAYS, limit_log_rate
from nvt_torchrec.inference.server.reload import BundleMetrics, Reloader
from nvt_torchrec.inference.server.served import Source, freeze_memory
from nvt_torchrec.inference.server.settings import ServerSettings
from nvt_torchrec.inference.server.sockets import (
    ACCEPT_AT_ONCE,
    BACKLOG,
    connection_limit,
    listen,
    load_certificate,
    refuse_new,
    tls_context,
)

log = logging.getLogger(__name__)

#: Seconds that a thread may hold the interpreter's lock. Python's default of 5 ms is longer than a
#: request takes, and the model's thread needs the lock between any two kernels.
_SWITCH_S = 0.0005
#: Seconds in which open connections may send one more request after the last one was accepted.
_GRACE_S = 1.0
#: Seconds to accept connections that had begun before new ones were refused.
_ACCEPT_S = 0.1


def serve(
    source: Source,
    settings: ServerSettings,
    listener: socket.socket | None = None,
    *,
    check: bool = True,
    started: Callable[[socket.socket], object],
    alone: Callable[[], bool] = lambda: True,
) -> None:
    """Serve until SIGTERM or SIGINT, then answer what was accepted.

    Args:
        source: Where the model comes from; a bundle is followed (:mod:`.reload`).
        settings: The limits.
        listener: The listening socket; None: make one when the model is open.
        check: Whether to compare the files of the first bundle with their digests.
        started: Called with the listening socket when the server answers.
        alone: Called at the end. Returns whether no other process goes on listening at this socket.

    Raises:
        SettingsError: A file that the settings name cannot be used.
        ClickLogError: The model cannot be opened.
    """
    keys = ApiKeys(settings.api_key_file) if settings.api_key_file else None
    tls = tls_context(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    reloaders: list[Reloader] = []
    if settings.reloads or source.bundle is not None:
        signal.signal(signal.SIGHUP, lambda *_: _reload(settings, keys, tls, reloaders))
    access_log = AccessLog(sys.stdout) if settings.access_log else None
    # the service alone keeps the model, so that it is let go when another one is put in its place
    service = make_service(source.open(check=check), settings, keys, access_log)
    freeze_memory()
    if source.bundle is not None:
        bundle_metrics = BundleMetrics(service.metrics)
        bundle_metrics.serves(service.served)
        reloaders.append(Reloader(source, service, bundle_metrics))
        reloaders[0].start()
    if settings.otel:
        from nvt_torchrec.inference.server.telemetry import traced

        service.app = traced(service.app)
    limit_log_rate()
    config = uvicorn.Config(
        service.app,
        log_config=None,
        access_log=False,
        loop="asyncio",  # uvloop accepts one connection between requests: under load, too few
        http=Connection,
        server_header=False,
        ws="none",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        # the limits of Connections are stricter; this one is for connections that never end
        timeout_graceful_shutdown=math.ceil(settings.timeout_s) + 5,
        ssl_context_factory=(lambda *_: tls) if tls else None,
    )
    sys.setswitchinterval(_SWITCH_S)
    # at its end, uvicorn raises the signal again for the handler that was there before
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    connections = Connections(settings, service.metrics, connection_limit(settings))
    try:
        with listener or listen(settings) as listening:
            tell = functools.partial(started, listening)
            server = _Server(config, service, connections, settings, tell, alone)
            server.run(sockets=[listening])
    finally:
        for reloader in reloaders:
            reloader.close()


def _reload(
    settings: ServerSettings,
    keys: ApiKeys | None,
    tls: ssl.SSLContext | None,
    reloaders: list[Reloader],
) -> None:
    for reloader in reloaders:
        reloader.wake()
    if keys:
        keys.reload()
    if tls:
        try:
            # into another context first: a failure leaves a context without a certificate
            tls_context(settings.tls_cert, settings.tls_key)
            load_certificate(tls, settings.tls_cert, settings.tls_key)
        except SettingsError as error:
            log.error("keeping the previous certificate: %s", error, extra=ALWAYS)


class _Server(uvicorn.Server):
    """Uvicorn's server, with limited connections, which drains before it ends."""

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
            listener.listen(BACKLOG)  # asyncio's `backlog` also bounds how many it accepts at once
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
        self._service.batcher.stop_delaying()
        await self._stop_accepting(sockets or [])
        end = time.monotonic() + _GRACE_S
        while self._connections.count and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets=sockets)

    async def _stop_accepting(self, listeners: list[socket.socket]) -> None:
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
        await asyncio.sleep(_ACCEPT_S)  # accepted sockets become connections
        for server in self.servers:
            server.close()

    def _drain(self) -> None:
        self._service.draining = True
        self._connections.drain()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT and multiprocessing.parent_process() is not None:
            return  # Ctrl-C reaches the parent, too, which sends SIGTERM
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
