"""How long the stages of a run take."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.kernels import compile_seconds

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.engine import Engine

log = logging.getLogger(__name__)


class StageTimer:
    """Measures and logs the seconds of each stage, and how many of them compiled kernels."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str, engine: Engine | None = None) -> Iterator[None]:
        """Measure a stage, and log how long it took.

        The time in which ``engine`` compares the GPU with the host is booked as the stage
        ``compare``, not as part of this one.
        """
        begin = time.perf_counter()
        compile_begin = compile_seconds()
        compare_begin = engine.compare_seconds if engine else 0.0
        yield
        compared = engine.compare_seconds - compare_begin if engine else 0.0
        self.seconds[name] = round(time.perf_counter() - begin - compared, 3)
        if compared:
            total = self.seconds.get("compare", 0.0) + compared
            self.seconds["compare"] = round(total, 3)
            log.info("compared with the host, kernels compiled: %.1f s", compared)
        compiled = compile_seconds() - compile_begin
        if compiled >= 0.1:
            seconds = self.seconds[name]
            log.info("%s: %.1f s, %.1f s of it compiling", name, seconds, compiled)
        else:
            log.info("%s: %.1f s", name, self.seconds[name])

    def timings(self, *, resumed: bool, rows: int, text_bytes: int) -> dict[str, Any]:
        """Return the content of ``timings.json``: seconds by stage, and speeds.

        The speeds are None if the run was resumed, as the seconds are only those of this process.

        Args:
            resumed: Whether an earlier process did a part of the work.
            rows: The number of rows read.
            text_bytes: Their size as text.
        """
        work = sum(self.seconds.get(name, 0.0) for name in ("events", "fit", "transform"))
        speeds: dict[str, Any] = {"rows_per_s": None, "text_mb_per_s": None}
        if work and not resumed:
            speeds["rows_per_s"] = round(rows / work)
            speeds["text_mb_per_s"] = round(text_bytes / work / 1e6, 1)
        return {"resumed": resumed, "seconds": dict(self.seconds), **speeds}
