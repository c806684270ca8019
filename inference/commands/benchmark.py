"""``python -m inference benchmark``: latency and rows/s by batch size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clicklog.command_line import check, flag
from inference.commands.model import FORMATS, ModelSettings

DESCRIPTION = "Measures latency and rows/s by batch size, beside those of Workflow.transform."


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings:
    """What to measure with."""

    input: str = flag("raw rows to measure with", metavar="FILE")
    format: str | None = flag("format of the input", None, choices=FORMATS)
    batch_sizes: tuple[int, ...] = flag("batch sizes", (1, 64, 4096), least=1)
    seconds: float = flag("time for each measurement", 2.0)
    json: Path | None = flag("write the results to this file, too", None, metavar="FILE")

    def __post_init__(self) -> None:
        check(self)


SETTINGS = (ModelSettings, BenchmarkSettings)


def run(model: ModelSettings, settings: BenchmarkSettings) -> None:
    """Measure, print a table, and perhaps write the results."""
    predictor = model.load()
    from inference.benchmark import run_benchmark

    run_benchmark(
        predictor,
        settings.input,
        settings.format,
        sizes=settings.batch_sizes,
        seconds=settings.seconds,
        stock=(model.workflow, model.checkpoint) if model.workflow else None,
        json=settings.json,
    )
