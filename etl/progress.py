"""The progress of a command: bars on a terminal, and the seconds that each stage took."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from nvt_torchrec.base.kernels import compile_seconds
from nvt_torchrec.etl.plan import Plan

log = logging.getLogger(__name__)


class RowsBar(tqdm):
    """A progress bar on a terminal: rows/s, MB of input per second, time left."""

    def __init__(self, what: str, plan: Plan, split: str | None = None, initial: int = 0) -> None:
        self.mb_per_row = plan.text_bytes(split) / max(1, plan.estimated_rows(split)) / 1e6
        total = plan.estimated_rows(split)
        super().__init__(
            desc=what, total=total, initial=initial, unit=" rows", unit_scale=True, disable=None
        )

    @property
    def format_dict(self) -> dict[str, Any]:
        """tqdm's fields, with the speed in MB/s."""
        value = super().format_dict
        rate = value["rate"] or (value["n"] - value["initial"]) / max(value["elapsed"], 1e-9)
        value["postfix"] = f"{rate * self.mb_per_row:.0f} MB/s"
        return value


class StageTimer:
    """Measures and logs the seconds of each stage, and how many of them compiled loops."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a stage; log how long it took."""
        begin, compiled = time.perf_counter(), compile_seconds()
        yield
        self.seconds[name] = round(time.perf_counter() - begin, 3)
        compiled = compile_seconds() - compiled
        words = f", {compiled:.1f} s of it compiling" if compiled >= 0.1 else ""
        log.info("%s: %.1f s%s", name, self.seconds[name], words)

    def timings(self, *, resumed: bool, rows: int, text_bytes: int) -> dict[str, Any]:
        """Return what ``timings.json`` holds: seconds by stage, and speeds unless it resumed.

        Args:
            resumed: Whether an earlier process did a part of the work.
            rows: The rows read.
            text_bytes: Their size as text.
        """
        work = self.seconds.get("fit", 0.0) + self.seconds.get("transform", 0.0)
        speeds: dict[str, Any] = {"rows_per_s": None, "text_mb_per_s": None}
        if work and not resumed:
            speeds["rows_per_s"] = round(rows / work)
            speeds["text_mb_per_s"] = round(text_bytes / work / 1e6, 1)
        return {"resumed": resumed, "seconds": dict(self.seconds), **speeds}
