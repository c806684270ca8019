"""Worker processes of the server, forked from a parent that has imported the modules they need.

Imported modules take far more memory than a model: 145 MB for PyTorch alone. A fork shares the
pages of its parent until one of them writes to a page, so a worker only takes memory for its own
objects.

The parent only imports modules: it opens no model, computes nothing with PyTorch and starts no
thread. A lock that a thread holds at the moment of a fork would stay locked in the child for ever.
(OpenBLAS and jemalloc, which NumPy and Arrow use, start threads too, but handle forks.) A worker
that ends is replaced by another fork, without importing again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable

import uvicorn
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import SIGNALS, Process

log = logging.getLogger(__name__)

#: The modules that open and score a model, which import all others that a worker needs.
_IMPORTED = (
    "nvt_torchrec.inference.server.app",
    "nvt_torchrec.inference.server.reload",
    "nvt_torchrec.models.registry",
    "uvicorn.protocols.http.httptools_impl",
)
#: The option of prctl(2) that sets the signal which Linux sends a process when its parent ends.
_PR_SET_PDEATHSIG = 1


class ForkedWorkers(Multiprocess):
    """The parent of the workers: uvicorn's supervisor, except that it forks the workers.

    Args:
        config: The configuration of each worker's server.
        listener: The socket on which all workers accept connections.
        ready: Called when all workers listen for the first time.

    Attributes:
        status: The exit status, after the supervisor has run.
    """

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, ready: Callable[[], object]
    ) -> None:
        import_application()
        super().__init__(config, [listener])
        self.status = 0
        self._ready = ready
        #: True once all workers have listened.
        self._started = False

    def init_processes(self) -> None:
        """Start the workers."""
        # A garbage collection writes to each object that it visits, which would copy the shared
        # pages. It skips frozen objects.
        gc.collect()
        gc.freeze()
        self.processes = [self._start_worker() for _ in range(self.processes_num)]

    def _start_worker(self) -> Process:
        worker = _ForkedWorker(self.config, self.sockets)
        worker.start()
        return worker

    def keep_subprocess_alive(self) -> None:
        """Replace workers that ended; if one ends before all have listened once, end the server."""
        if self._started:
            self._replace_ended()
        elif any(worker.exitcode is not None for worker in self.processes):
            # A worker that ends during the start could not open the model; a new one could not
            # either.
            if not self.signal_queue and not self.should_exit.is_set():
                self.status = 2
                self.should_exit.set()
        elif all(worker.is_ready() for worker in self.processes):
            self._started = True
            self._ready()

    def _replace_ended(self) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        for index, worker in enumerate(self.processes):
            if worker.is_alive(timeout=self.config.timeout_worker_healthcheck):
                continue
            worker.kill()  # it may not have ended, but hang
            worker.join()
            if self.should_exit.is_set():
                return
            mark_process_dead(worker.pid)
            log.warning("worker %d ended; a new one was started", worker.pid)
            self.processes[index] = self._start_worker()

    def terminate_all(self) -> None:
        """Ask the workers to end."""
        # The address accepts connections until the last process closes the socket. That shall be a
        # worker, not this process.
        for listener in self.sockets:
            listener.close()
        super().terminate_all()

        # A second signal ends the drain at once, as in a server without workers.
        def terminate_again(*_: object) -> None:
            for worker in self.processes:
                worker.process.terminate()

        signal.signal(signal.SIGTERM, terminate_again)

    def handle_int(self) -> None:
        """End with the exit status of Ctrl-C."""
        self.status = 130
        super().handle_int()

    def handle_hup(self) -> None:
        """Let the workers check for another bundle."""
        for worker in self.processes:
            if worker.is_ready():  # a worker that is still starting will open the new bundle anyway
                os.kill(worker.pid, signal.SIGHUP)  # type: ignore[arg-type]

    def handle_ttin(self) -> None:
        """Start an additional worker, as uvicorn does at this signal."""
        self.processes_num += 1
        self.processes.append(self._start_worker())


def import_application() -> None:
    """Import the modules that a worker needs, without starting threads or opening a model."""
    for module in _IMPORTED:
        importlib.import_module(module)


class _ForkedWorker(Process):
    """Uvicorn's handle of a worker, whose process is a fork."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(config, sockets)
        run = functools.partial(self._run, sockets, os.getpid())
        self.process = multiprocessing.get_context("fork").Process(target=run)  # type: ignore[assignment]

    def start(self) -> None:
        """Fork."""
        # The child inherits the parent's signal handlers, which only pass signals to the parent's
        # loop, so a signal to the child would be lost. Block signals until _run has reset them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self, sockets: list[socket.socket], parent: int) -> None:
        """Serve, in the child."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the call of prctl
            os._exit(0)
        with contextlib.suppress(KeyboardInterrupt):  # the parent handles Ctrl-C
            self.target(sockets)
