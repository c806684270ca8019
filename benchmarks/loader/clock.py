"""Measure time, CPU time, and the share of the machine that other programs take meanwhile."""

from __future__ import annotations

import os
import time

PROCESSORS = os.cpu_count() or 1


class Clock:
    """Seconds, CPU seconds of this process, and the share of the processors that others took."""

    def __init__(self) -> None:
        self._begin = self._now()

    def stop(self) -> tuple[float, float, float]:
        """Return the three since the clock was made."""
        seconds, cpu, busy = (b - a for a, b in zip(self._begin, self._now(), strict=True))
        return seconds, cpu, max(busy - cpu, 0) / (seconds * PROCESSORS)

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), _busy_seconds()


def _busy_seconds() -> float:
    """Return the CPU seconds of all processes since the machine started, and of its host."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(
                int, file.readline().split()[1:]
            )
    except OSError:  # not Linux
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
