"""Several processes that serve, forked of a parent that has imported what they need.

What is imported takes far more memory than a model: 145 MB for PyTorch alone. A fork shares the
pages of its parent, as long as nobody writes to them, so each worker has only what it makes itself.
For this, the parent does nothing but import. It opens no model, computes nothing with PyTorch and
starts no thread of its own, because a thread that holds a lock at the fork leaves it locked in the
child for ever. (The threads that NumPy's OpenBLAS and Arrow's jemalloc start prepare themselves for
forks.) A worker that ends is replaced by another fork, without importing again.
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

#: What a worker imports to open and score a model: with these, also all that they need.
_IMPORTED = (
    "nvt_torchrec.inference.server.app",
    "nvt_torchrec.inference.server.reload",
    "nvt_torchrec.models.registry",
    "uvicorn.protocols.http.httptools_impl",
)
#: Linux: the signal that the kernel sends a process when its parent ends, see prctl(2).
_PR_SET_PDEATHSIG = 1


class ForkedWorkers(Multiprocess):
    """The parent of workers: uvicorn's, but that it forks them.

    Args:
        config: The server of each worker.
        listener: The socket that all of them accept connections of.
        ready: Called when all of them listen for the first time.

    Attributes:
        status: The exit status, when it has run.
    """

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, ready: Callable[[], object]
    ) -> None:
        import_application()
        super().__init__(config, [listener])
        self.status = 0
        self._ready, self._started = ready, False

    def init_processes(self) -> None:
        """Start the workers."""
        gc.collect()
        gc.freeze()  # a worker's collector would write to all objects, and so copy their pages
        self.processes = [self._start_worker() for _ in range(self.processes_num)]

    def _start_worker(self) -> Process:
        worker = _ForkedWorker(self.config, self.sockets)
        worker.start()
        return worker

    def keep_subprocess_alive(self) -> None:
        """Replace workers that ended; before all of them listen, end instead."""
        if self._started:
            self._replace_ended()
        elif any(worker.exitcode is not None for worker in self.processes):
            # if nobody ended it, another one would fail in the same way
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
            worker.kill()  # it may have hung
            worker.join()
            if self.should_exit.is_set():
                return
            mark_process_dead(worker.pid)
            log.warning("worker %d ended; another one was started", worker.pid)
            self.processes[index] = self._start_worker()

    def terminate_all(self) -> None:
        """Ask the workers to end."""
        for listener in self.sockets:  # so that it is closed when the last worker closes it
            listener.close()
        super().terminate_all()
        # a second signal ends a drain, as it does without workers
        signal.signal(signal.SIGTERM, lambda *_: [w.process.terminate() for w in self.processes])  # type: ignore[func-returns-value]

    def handle_int(self) -> None:
        """End, after Ctrl-C."""
        self.status = 130
        super().handle_int()

    def handle_hup(self) -> None:
        """Let the workers look for another bundle."""
        for worker in self.processes:
            if worker.is_ready():  # others read the bundle in a moment anyway
                os.kill(worker.pid, signal.SIGHUP)  # type: ignore[arg-type]

    def handle_ttin(self) -> None:
        """Start a further worker, as uvicorn does at this signal."""
        self.processes_num += 1
        self.processes.append(self._start_worker())


def import_application() -> None:
    """Import what a worker needs, without starting threads or opening anything."""
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
        # A signal that arrives in the child before it has let go of the parent's handlers would be
        # noted there and forgotten.
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
        if os.getppid() != parent:  # it ended before the kernel was asked
            os._exit(0)
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the parent's to report
            self.target(sockets)
