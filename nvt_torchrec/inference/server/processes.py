"""Start the processes that serve a model, and shut them down in order."""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import os
import signal
import socket
import sys
import tempfile
from typing import TYPE_CHECKING

import uvicorn

from nvt_torchrec.base.errors import SettingsError, run_command
from nvt_torchrec.base.threads import count_cores
from nvt_torchrec.inference.server.forked_workers import ForkedWorkers
from nvt_torchrec.inference.server.serve_settings import SHARED_VALUES, ModelSource, ServerSettings

if TYPE_CHECKING:
    from nvt_torchrec.inference.server.app import Service

#: The seconds that a thread may hold the interpreter lock while another one waits for it. Python's
#: default of 5 ms is longer than a whole request takes, and the model's thread needs the lock
#: between any two kernels.
_SWITCH_S = 0.0005
#: The seconds that an idle connection stays open. Proxies usually close theirs after 60 s; if the
#: server closed first, a proxy could send a request into a connection that is closing.
_KEEP_ALIVE_S = 75
#: The seconds in which a worker must answer its parent. Imports of extension modules may hold the
#: interpreter lock for a long time.
_REACTION_S = 60


def serve(source: ModelSource, settings: ServerSettings) -> int:
    """Serve until SIGTERM or SIGINT, then answer the requests that have arrived.

    Several workers are forked from a parent that has imported the application, and each worker
    opens the model itself (:mod:`.forked_workers`).

    Args:
        source: The object from which each process loads the model. If it is a bundle, it is
            reloaded when it changes (:mod:`.reload`).
        settings: The settings of each process.

    Returns:
        The exit status.

    Raises:
        SettingsError: The address cannot be listened on.
        ClickLogError: The model cannot be opened.
    """
    make_application = _open_service if settings.workers == 1 else _open_in_worker
    config = uvicorn.Config(
        functools.partial(make_application, source, settings),
        factory=True,
        workers=settings.workers,
        log_config=None,
        access_log=False,
        # uvloop accepts only one connection between two requests, which is too few under load.
        loop="asyncio",
        http="httptools",
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.timeout_s) + 1,
        timeout_worker_healthcheck=_REACTION_S,
    )
    with _bind_socket(settings) as listener:
        if settings.workers == 1:
            # When uvicorn has shut down, it raises the signal again for this handler.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            _Server(config).run(sockets=[listener])
            return 0
        # PyTorch and OpenBLAS read these when they are imported. OpenBLAS only serves NumPy, which
        # multiplies no matrices here.
        threads = max(1, count_cores() // settings.workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # This import takes seconds, during which SIGTERM ends the process without cleaning up. So
        # it comes before the temporary directory is created.
        import nvt_torchrec.inference.server.reload  # noqa: F401

        with tempfile.TemporaryDirectory(prefix="inference-serve-") as values:
            # prometheus_client reads it when it is imported, which the next statement causes.
            os.environ[SHARED_VALUES] = values
            workers = ForkedWorkers(config, listener, functools.partial(_print_address, listener))
            workers.run()
            return workers.status


def _bind_socket(settings: ServerSettings) -> socket.socket:
    """Bind a socket to the address. It will listen once the first process can answer."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sets TCP_NODELAY on connections only if the protocol is given explicitly.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}",
            "choose another --port or --host",
        ) from error
    return listener


def _print_address(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    if ":" in host:  # IPv6
        host = f"[{host}]"
    print(f"serving on http://{host}:{port}", flush=True)


class _Server(uvicorn.Server):
    """Uvicorn's server, which also prints its address once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _print_address((sockets or [])[0])


def _open_in_worker(source: ModelSource, settings: ServerSettings) -> Service:
    """Make the application of a worker; if the model cannot be opened, print the error.

    The parent cannot print it, because it only sees that the worker ended.
    """
    services: list[Service] = []
    status = run_command(lambda: services.append(_open_service(source, settings)))
    if status:
        raise SystemExit(status)
    return services[0]


def _open_service(source: ModelSource, settings: ServerSettings) -> Service:
    """Open the model and make the application. Uvicorn calls this in its event loop."""
    # Until the model is open, exit without cleaning up: there is nothing to shut down yet, and the
    # previous handler raises SystemExit, which some imported modules catch.
    end = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if source.bundle is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from nvt_torchrec.inference.server.app import Service
    from nvt_torchrec.inference.server.reload import open_served

    service = Service(open_served(source), settings)
    # Keep the garbage collector from visiting the objects that now exist and will stay.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
    loop = asyncio.get_running_loop()
    if source.bundle is not None:
        loop.add_signal_handler(signal.SIGHUP, service.follow(source).wake)
    loop.add_signal_handler(signal.SIGTERM, service.drain, lambda: end(signal.SIGTERM, None))  # type: ignore
    return service
