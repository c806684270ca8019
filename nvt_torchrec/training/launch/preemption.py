"""Stop all ranks after the same step when SIGTERM announces the end of the job."""

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

#: 128 + SIGTERM, the status of a process that the signal ended: torchrun counts it as a failure,
#: which --max-restarts restarts; Kubeflow's restartPolicy ExitCode retries it.
EXIT_STATUS = 128 + signal.SIGTERM
#: The ranks exchange their requests about this often, and at least after so many steps.
_INTERVAL_SECONDS, _MAX_STEPS = 0.25, 16


class StopRequests:
    """Turn SIGTERM into a stop that all ranks agree on. Use it as a context manager.

    Python lets the main thread alone handle signals: in another one SIGTERM is left as it is.

    The ranks exchange their requests by an all-reduce that runs during the next steps, so no step
    waits for it. A rank that waits for one that is gone cannot agree: the launcher ends it.

    Args:
        group: This rank. The constructor is collective.
    """

    def __init__(self, group: Group) -> None:
        self._alone = group.world_size == 1
        self._world_size = group.world_size
        self._requested = False
        self._decided = False  # from here on no rank waits for another one
        if not self._alone:
            self._process_group = dist.new_group(backend="gloo")
        self._work: dist.Work | None = None
        self._last_exchange, self._steps_measured = time.monotonic(), 1
        self._steps, self._steps_between = 0, 1

    def __enter__(self) -> StopRequests:
        self._before: Any = None  # None: the signal is not handled here
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._request) or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        decided = self._decided
        if kind is None:
            self.finish()
        self._decided = True
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if isinstance(error, Exception) and self._requested and not (self._alone or decided):
            # The launcher ends this rank because another one failed: the error only follows from
            # that, so it is not reported.
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, failed: bool = False) -> bool:
        """Return whether to stop now, the same on all ranks (collective; call it after each step).

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
            # computed from integers, so that all ranks get the same number
            seconds_per_step = milliseconds / 1000 / self._world_size / self._steps_measured
            steps = round(_INTERVAL_SECONDS / max(seconds_per_step, 1e-9))
            self._steps_between = min(max(steps, 1), _MAX_STEPS)
        now = time.monotonic()
        self._sums: torch.Tensor = torch.tensor(
            [int(mine), round(1000 * (now - self._last_exchange))]
        )
        self._work = dist.all_reduce(self._sums, group=self._process_group, async_op=True)
        self._last_exchange, self._steps_measured, self._steps = now, self._steps, 0
        return False

    def finish(self) -> None:
        """Let SIGTERM change nothing from here on (collective).

        Call it when all that takes other ranks is done: a rank may then outlive the others.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._decided = True

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
