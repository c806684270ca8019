"""``python -m inference benchmark``: latency and rows/s by batch size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS
from nvt_torchrec.inference.commands.model import ModelSettings

DESCRIPTION = (
    "Measures latency and rows/s by batch size, beside those of Workflow.transform, and the "
    "latency of one row while all cores are busy."
)


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """What to measure with."""

    input: str = flag("raw rows to measure with", metavar="FILE")
    format: str | None = flag("format of the input", None, choices=tuple(INPUT_FORMATS))
    batch_sizes: tuple[int, ...] = flag("batch sizes", (1, 64, 4096), least=1)
    seconds: float = flag("time for each measurement", 2.0)
    onnx: Path | None = flag("the same model as exported, to measure, too", None, metavar="FILE")


SETTINGS = (ModelSettings, BenchmarkSettings)


def run(model: ModelSettings, settings: BenchmarkSettings) -> None:
    """Measure, and print the tables."""
    predictor, stock = model.load(), None
    from nvt_torchrec.inference.benchmark import (
        Stock,
        first_rows,
        measure,
        print_one_row,
        print_table,
    )
    from nvt_torchrec.inference.predictor import input_spec

    spec = input_spec(predictor.spec, settings.input, settings.format)
    rows = first_rows(settings.input, spec, max(*settings.batch_sizes, 1 << 14))
    if model.workflow and model.checkpoint:
        stock = Stock(model.workflow, model.checkpoint, predictor.model.device)
    seconds = settings.seconds
    sizes = settings.batch_sizes
    print_table({n: measure(predictor, stock, rows, n, seconds, settings.onnx) for n in sizes})
    print_one_row(predictor, rows[0], seconds)
