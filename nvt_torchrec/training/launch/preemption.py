"""Stop all ranks after the same step when the job gets SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from nvt_torchrec.training.launch.distributed import Group

#: 128 + SIGTERM, the exit status of a process that the signal ended. torchrun counts it as a
#: failure, which --max-restarts restarts; Kubeflow's restartPolicy ExitCode retries it.
EXIT_STATUS = 128 + signal.SIGTERM
#: The approximate time between two exchanges of requests.
_INTERVAL_SECONDS = 0.25
#: The largest number of steps between two exchanges.
_MAX_STEPS = 16


class StopRequests:
    """Turn SIGTERM into a stop that all ranks agree on. Use it as a context manager.

    In Python only the main thread handles signals. In another thread SIGTERM is not handled.

    The ranks exchange their requests in an all-reduce that runs during the next steps, so that no
    step waits for it. A rank that waits for a rank that is gone cannot agree with it; the launcher
    ends the waiting rank.

    Args:
        group: This rank. The constructor is collective.
    """

    def __init__(self, group: Group) -> None:
        self._alone = group.world_size == 1
        self._world_size = group.world_size
        self._requested = False
        #: Whether the ranks have agreed to stop, or to finish: they need no more exchanges.
        self._decided = False
        if not self._alone:
            self._process_group = dist.new_group(backend="gloo")
        self._work: dist.Work | None = None  # the all-reduce in progress
        self._last_exchange = time.monotonic()  # when it started
        self._steps = 0  # since the last exchange
        self._steps_between = 1  # between two exchanges
        self._steps_measured = 1  # that the time in the all-reduce covers

    def __enter__(self) -> StopRequests:
        self._previous_handler: Any = None  # None if SIGTERM is not handled here
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGTERM, self._request)
            self._previous_handler = previous or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        was_decided = self._decided
        if kind is None:
            self.finish()
        self._decided = True
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
        if self._alone or was_decided or not self._requested:
            return
        if isinstance(error, Exception):
            # The launcher ends this rank because another one failed, which also caused the error
            # here. So end by the signal instead of reporting the error.
            os.kill(os.getpid(), signal.SIGTERM)

    def is_asked(self, failed: bool = False) -> bool:
        """Return whether to stop now, the same on all ranks (collective). Call it after each step.

        Args:
            failed: Whether this rank has another reason to stop.
        """
        mine = self._requested or failed
        if self._alone:
            return mine
        self._steps += 1
        if self._steps < self._steps_between:
            return False
        if self._work is not None:
            self._work.wait()
            self._work = None
            requests, milliseconds = self._sums.tolist()
            if requests:
                self._decided = True
                return True
            # The next exchange must come after the same step on all ranks. So its step is computed
            # from integer sums, which are identical on all ranks.
            seconds_per_step = milliseconds / 1000 / self._world_size / self._steps_measured
            steps = round(_INTERVAL_SECONDS / max(seconds_per_step, 1e-9))
            self._steps_between = min(max(steps, 1), _MAX_STEPS)
        now = time.monotonic()
        self._sums: torch.Tensor = torch.tensor(
            [int(mine), round(1000 * (now - self._last_exchange))]
        )
        self._work = dist.all_reduce(self._sums, group=self._process_group, async_op=True)
        self._last_exchange = now
        self._steps_measured = self._steps
        self._steps = 0
        return False

    def finish(self) -> None:
        """Ignore SIGTERM from here on (collective).

        Call it when nothing remains that needs other ranks; a rank may then outlive the others.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._decided = True

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
