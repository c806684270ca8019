"""SIGTERM, by which schedulers and launchers announce the end: all ranks stop after one step."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from dlrm.launch.distributed import Group, gathered

#: 128 + SIGTERM, as if the signal had ended the process: torchrun counts it as a failure, which
#: --max-restarts restarts, and Kubeflow's restartPolicy ExitCode for one that is worth a retry.
EXIT_STATUS = 128 + signal.SIGTERM
#: Seconds between two times the ranks ask each other, and how many steps may lie between them.
_SECONDS, _STEPS = 0.25, 16


class StopRequests:
    """Turns SIGTERM into a stop that all ranks agree on; a context that has to be entered.

    The ranks ask each other every quarter of a second, by an all-reduce that goes on during the
    next steps, so no step waits for it. A rank that hangs because another one is gone cannot
    agree: there SIGTERM ends the process soon, as it would without this.

    Args:
        group: this rank (collective).
    """

    def __init__(self, group: Group) -> None:
        self._alone = group.world_size == 1
        self._world_size = group.world_size
        self._requested = False
        self._settled = threading.Event()
        if not self._alone:
            self._own = dist.new_group(backend="gloo")
            self._peers = _processes_here(group)
        self._work: dist.Work | None = None
        self._since, self._timed = time.monotonic(), 1
        self._count, self._every = 0, 1

    def __enter__(self) -> StopRequests:
        self._stack = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, self._note)
            self._stack.callback(signal.signal, signal.SIGTERM, before or signal.SIG_DFL)
            if not self._alone:
                self._watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None and self._work is not None:
            self._work.wait()  # the other ranks have begun it, too
        agreed = self._settled.is_set()
        self._settled.set()
        self._stack.close()
        if isinstance(error, Exception) and self._requested and not (self._alone or agreed):
            # the launcher ends this rank because another one failed: say nothing of what followed
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, failed: bool = False) -> bool:
        """Whether to stop now, the same on all ranks (collective; call it after each step).

        Args:
            failed: stop for another reason, which this rank knows.
        """
        mine = self._requested or failed
        if self._alone:
            return mine
        self._count += 1
        if self._count < self._every:
            return False
        if self._work is not None:
            self._work.wait()
            self._work = None
            requests, milliseconds = self._sums.tolist()
            if requests:
                self._settled.set()
                return True
            # of integers, so that all ranks find the same
            step = milliseconds / 1000 / self._world_size / self._timed
            self._every = min(max(round(_SECONDS / max(step, 1e-9)), 1), _STEPS)
        now = time.monotonic()
        self._sums = torch.tensor([int(mine), round(1000 * (now - self._since))])
        self._work = dist.all_reduce(self._sums, group=self._own, async_op=True)
        self._since, self._timed, self._count = now, self._count, 0
        return False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requested = True

    def _watch(self) -> None:
        """Let a thread hear of SIGTERM, which the main one does not while it waits for a GPU."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._leave_with_peers, args=(reader,), daemon=True)
        thread.start()
        self._stack.callback(os.close, reader)
        self._stack.callback(thread.join)
        self._stack.callback(os.close, writer)
        self._stack.callback(signal.set_wakeup_fd, before)

    def _leave_with_peers(self, reader: int) -> None:
        while (number := os.read(reader, 1)) != bytes([signal.SIGTERM]):
            if not number:
                return  # closed
        while not self._settled.wait(1.0):
            if not all(map(_is_running, self._peers)):
                os._exit(EXIT_STATUS)


def _processes_here(group: Group) -> list[int]:
    """The processes of other ranks on this machine (collective)."""
    everyone = gathered(group, (socket.gethostname(), os.getpid()))
    host, own = everyone[group.rank]
    found = [process for name, process in everyone if name == host and process != own]
    return [process for process in found if _is_running(process)]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
