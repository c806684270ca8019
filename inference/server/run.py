"""From a predictor to a process that listens, and that ends well."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import math
import signal
import socket
import sys
from types import FrameType

import uvicorn

from clicklog.errors import SettingsError
from inference.predictor import Predictor
from inference.server.app import Service, make_service
from inference.server.settings import ServerSettings

log = logging.getLogger(__name__)

_BACKLOG = 2048
#: Longer than proxies keep idle connections (60 s usually), so that it is they who close them.
_KEEP_ALIVE_S = 75
#: Seconds a thread may keep the interpreter. Python's 5 ms are longer than a request takes, and the
#: model's thread needs the interpreter between any two kernels.
_SWITCH_S = 0.0005


def serve(predictor: Predictor, settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then answer what was accepted.

    Raises:
        SettingsError: the address cannot be listened on.
    """
    listener = _listen(settings)
    _warm_up(predictor)
    service = make_service(predictor, settings)
    config = uvicorn.Config(
        service.app,
        log_config=None,
        access_log=False,
        loop="asyncio",  # uvloop takes up one connection between requests: under load some starve
        server_header=False,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        # limits of our own are stricter; this one is for connections that never end
        timeout_graceful_shutdown=math.ceil(settings.timeout_s) + 5,
    )
    sys.setswitchinterval(_SWITCH_S)
    # when it has ended, uvicorn raises the signal again for whoever handled it before
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _Server(config, service, settings.drain_s).run(sockets=[listener])


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server(
            (settings.host, settings.port), family=family, backlog=_BACKLOG
        )
    except OSError as error:
        raise SettingsError(
            f"{settings.host} port {settings.port} cannot be listened on: {error.strerror}",
            "choose another --port or --host",
        ) from error
    # connections inherit it; asyncio sets it only where the protocol is given explicitly, and
    # without it an answer waits 40 ms for an acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        log.warning(
            "%s can be reached from other machines; there are no passwords and no TLS here: "
            "put a proxy in front",
            settings.host,
        )
    return listener


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
    """Uvicorn's, which says where it listens, and drains before it ends."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float) -> None:
        super().__init__(config)
        self._service, self._drain_s = service, drain_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            print(f"serving on http://{host}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.batcher.hurry()
        await super().shutdown(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        first, self._service.draining = not self._service.draining, True
        if not (first and self._drain_s and sig == signal.SIGTERM and self._loop):
            super().handle_exit(sig, frame)
            return
        log.info("draining for %g s", self._drain_s)
        end = super().handle_exit
        self._loop.call_soon_threadsafe(
            lambda: self._loop.call_later(self._drain_s, lambda: end(sig, frame))
        )
