"""Several worker processes that serve one bundle at one address, and their parent process.

The parent listens, starts the workers, replaces those that end, and imports neither torch nor the
server. Workers are spawned, not forked, because a process that has run PyTorch's threads or used a
GPU cannot be forked. All of them map the bundle, so its pages are in memory once. The first worker
compares the bundle's files with their digests; the others are started when it is ready. A worker
that replaces another one compares them again. Each worker follows the bundle by itself
(:mod:`.reload`).
prometheus_client adds the counters up, in a directory that the parent removes when it ends.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec.base.errors import run_command
from nvt_torchrec.inference.server.logs import limit_log_rate
from nvt_torchrec.inference.server.settings import SHARED_VALUES, ServerSettings
from nvt_torchrec.inference.server.sockets import listen

if TYPE_CHECKING:
    from nvt_torchrec.inference.predictor import Predictor

log = logging.getLogger(__name__)

_TICK_S = 0.2
#: Seconds between two starts of the same worker.
_PAUSE_S = 1.0
_READY, _ALL_STOP = b"ready", b"all stop"


def serve_in_workers(
    load: Callable[..., Predictor],
    bundle: Path,
    settings: ServerSettings,
    started: Callable[..., object],
) -> int:
    """Serve until SIGTERM or SIGINT; pass SIGHUP on to the workers.

    Args:
        load: Returns a worker's predictor; see :class:`inference.server.served.Source`.
        bundle: The directory of the bundle, or a symbolic link to it.
        settings: The settings of each worker.
        started: Called with the listening socket when all workers answer.

    Returns:
        The exit status: 0, or that of a worker that could not start.

    Raises:
        SettingsError: The address cannot be listened on.
    """
    limit_log_rate()
    with tempfile.TemporaryDirectory(prefix="inference-serve-") as values:
        os.environ[SHARED_VALUES] = values
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // settings.workers)))
        with listen(settings) as listener:
            parent = _Parent(load, bundle, settings, listener)
            return parent.run(lambda: started(listener))


@dataclasses.dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    since: float
    ready: bool = False
    reload: bool = False  # SIGHUP came before it was ready


class _Parent:
    def __init__(
        self,
        load: Callable[..., Predictor],
        bundle: Path,
        settings: ServerSettings,
        listener: socket.socket,
    ) -> None:
        self._load, self._bundle = load, bundle
        self._settings, self._listener = settings, listener
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._signals: list[int] = []
        self._stopping = self._started = self._checked = False
        self._status = 0

    def run(self, started: Callable[[], object]) -> int:
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, lambda sig, _: self._signals.append(sig))
        missing = self._settings.workers
        pause_until = 0.0
        while self._workers or not self._stopping:
            while self._may_start() and missing and time.monotonic() >= pause_until:
                self._start()
                missing -= 1
            pipes = [worker.pipe for worker in self._workers if not worker.ready]
            wait([*(worker.process.sentinel for worker in self._workers), *pipes], _TICK_S)
            for worker in [worker for worker in self._workers if not worker.ready]:
                self._update(worker)
            if not self._started and sum(worker.ready for worker in self._workers) == (
                self._settings.workers
            ):
                self._started = True
                started()
            for worker in [w for w in self._workers if w.process.exitcode is not None]:
                self._ended(worker)
                missing += 1
                pause_until = worker.since + _PAUSE_S
            while self._signals:
                self._pass_on(self._signals.pop(0))
        return self._status

    def _may_start(self) -> bool:
        return not self._stopping and (self._checked or not self._workers)

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        # a replacement checks, too: it may find another bundle at the same path
        check = self._started or not self._checked
        process = self._context.Process(
            target=_work,
            args=(self._load, self._bundle, check, self._settings, self._listener, theirs),
        )
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours, time.monotonic()))

    def _update(self, worker: _Worker) -> None:
        """Notice that a worker is ready; pass on the SIGHUP that came before."""
        try:
            worker.ready = worker.pipe.poll() and worker.pipe.recv_bytes() == _READY
        except (EOFError, OSError):  # it has ended
            return
        self._checked |= worker.ready
        if worker.ready and worker.reload:
            os.kill(worker.process.pid, signal.SIGHUP)

    def _ended(self, worker: _Worker) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(worker.process.pid)
        self._workers.remove(worker)
        worker.pipe.close()
        if self._stopping:
            return
        if not self._started:  # another one would fail in the same way
            self._status = abs(worker.process.exitcode) or 1
            self._stop(signal.SIGTERM)
            return
        log.warning(
            "worker %d ended with status %d; starting another one",
            worker.process.pid,
            worker.process.exitcode,
        )

    def _pass_on(self, sig: int) -> None:
        if sig == signal.SIGHUP:
            for worker in self._workers:
                if worker.ready:
                    os.kill(worker.process.pid, sig)
                worker.reload = True  # if it is not ready, it may have read the files already
        else:
            if sig == signal.SIGINT:
                self._status = 130
            self._stop(signal.SIGTERM)

    def _stop(self, sig: int) -> None:
        self._stopping = True
        for worker in self._workers:
            try:
                worker.pipe.send_bytes(_ALL_STOP)
            except OSError:  # it has ended
                continue
            os.kill(worker.process.pid, sig)


def _work(
    load: Callable[..., Predictor],
    bundle: Path,
    check: bool,
    settings: ServerSettings,
    listener: socket.socket,
    pipe: Connection,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until requests are served
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too
    from nvt_torchrec.dlrm.launch.startup import prepare_torch

    prepare_torch()
    from nvt_torchrec.inference.server.run import serve
    from nvt_torchrec.inference.server.served import Source

    def started(_: socket.socket) -> None:
        pipe.send_bytes(_READY)
        _end_with_parent()

    def work() -> None:
        source = Source(load, bundle)
        serve(source, settings, listener, check=check, started=started, alone=pipe.poll)

    raise SystemExit(run_command(work))


def _end_with_parent() -> None:
    """Send this process SIGTERM when its parent has ended."""
    import asyncio

    parent = multiprocessing.parent_process()
    loop = asyncio.get_running_loop()

    def gone() -> None:
        loop.remove_reader(parent.sentinel)
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(parent.sentinel, gone)
