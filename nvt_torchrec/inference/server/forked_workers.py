"""Worker processes of the server, forked from a parent that has imported what they need.

Imported modules take far more memory than a model: 145 MB for PyTorch alone. A fork shares the
pages of its parent for as long as nobody writes to them, so a worker takes memory only for what it
makes itself.

The parent imports, and does nothing else: it opens no model, computes nothing with PyTorch and
starts no thread. A thread that holds a lock at the moment of a fork would leave it locked in the
child for ever. (NumPy's OpenBLAS and Arrow's jemalloc start threads too, and prepare them for
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

#: The modules that open and score a model; with them everything that they import.
_IMPORTED = (
    "nvt_torchrec.inference.server.app",
    "nvt_torchrec.inference.server.reload",
    "nvt_torchrec.models.registry",
    "uvicorn.protocols.http.httptools_impl",
)
#: Linux: the signal that the kernel sends a process when its parent ends, see prctl(2).
_PR_SET_PDEATHSIG = 1


class ForkedWorkers(Multiprocess):
    """The parent of the workers: uvicorn's, except that it forks them.

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
        self._ready = ready
        #: Whether all workers have listened once.
        self._started = False

    def init_processes(self) -> None:
        """Start the workers."""
        # A garbage collection writes to each object that it visits, which would copy the shared
        # pages. It leaves frozen objects alone.
        gc.collect()
        gc.freeze()
        self.processes = [self._start_worker() for _ in range(self.processes_num)]

    def _start_worker(self) -> Process:
        worker = _ForkedWorker(self.config, self.sockets)
        worker.start()
        return worker

    def keep_subprocess_alive(self) -> None:
        """Replace workers that ended. Before all of them have listened once, end the server."""
        if self._started:
            self._replace_ended()
        elif any(worker.exitcode is not None for worker in self.processes):
            # A worker that ended by itself could not open the model, and neither could another.
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
            worker.kill()  # it may hang
            worker.join()
            if self.should_exit.is_set():
                return
            mark_process_dead(worker.pid)
            log.warning("worker %d ended; another one was started", worker.pid)
            self.processes[index] = self._start_worker()

    def terminate_all(self) -> None:
        """Ask the workers to end."""
        # The address accepts connections until its last holder closes the socket, which is to be
        # the last worker.
        for listener in self.sockets:
            listener.close()
        super().terminate_all()

        # A second signal ends a drain at once, as it does without workers.
        def terminate_again(*_: object) -> None:
            for worker in self.processes:
                worker.process.terminate()

        signal.signal(signal.SIGTERM, terminate_again)

    def handle_int(self) -> None:
        """End, after Ctrl-C."""
        self.status = 130
        super().handle_int()

    def handle_hup(self) -> None:
        """Let the workers look for another bundle."""
        for worker in self.processes:
            if worker.is_ready():  # one that still starts will open the bundle anyway
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
        # Until the child has reset them, it has the parent's handlers, which note a signal for the
        # parent's loop: in the child it would be lost. So signals wait until _run has reset them.
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
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(0)
        with contextlib.suppress(KeyboardInterrupt):  # the parent reports Ctrl-C
            self.target(sockets)
