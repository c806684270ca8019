"""``python -m inference predict``: score a file of raw rows."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS
from nvt_torchrec.inference.commands.model import ModelSettings

DESCRIPTION = (
    "Scores raw rows and writes their click probabilities to a parquet file, in the order of the "
    "rows."
)


@dataclasses.dataclass(frozen=True)
class PredictSettings(Settings):
    """The file to score, and the file to write."""

    # fmt: off
    input: str = flag(
        "file of raw rows, with or without labels: TSV, CSV, JSON lines (all also compressed) or "
        "parquet; a path or URL", metavar="FILE"
    )
    output: Path = flag("file to write", metavar="PARQUET")
    format: str | None = flag(
        "format of the input (default: by the suffix of its name, such as .parquet, or else the "
        "training log's)", None, choices=tuple(INPUT_FORMATS)
    )
    id_columns: tuple[str, ...] = flag("columns of the input to copy to the output", ())
    on_bad_rows: str = flag(
        "error: stop at the first malformed row; quarantine: write malformed rows to "
        "OUTPUT.rejected.tsv and continue",
        "error", choices=("error", "quarantine")
    )
    workers: int | None = flag("number of threads (default: one per core)", None, minimum=1)
    evaluate: bool = flag("print metrics, such as AUROC; the rows must have labels", False)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output.suffix in (".csv", ".tsv", ".json", ".jsonl", ".txt"):
            name = self.output.with_suffix(".parquet")
            raise SettingsError(
                f"--output {self.output}: scores are written as parquet", f"name it {name}"
            )


SETTINGS = (ModelSettings, PredictSettings)


def run(model: ModelSettings, settings: PredictSettings) -> None:
    """Score the rows; print their number and, with --evaluate, metrics."""
    predictor = model.load()
    from nvt_torchrec.inference.bulk import evaluate_file, predict_file
    from nvt_torchrec.models.metrics import to_json

    begin = time.perf_counter()
    scored = predict_file(
        predictor,
        settings.input,
        settings.output,
        file_format=settings.format,
        id_columns=settings.id_columns,
        reject=settings.on_bad_rows == "quarantine",
        need_label=settings.evaluate,
        workers=settings.workers,
    )
    seconds = time.perf_counter() - begin
    counts = f"{scored.rows} rows scored"
    if scored.rejected:
        counts += f", {scored.rejected} rejected"
    print(f"{counts} in {seconds:.1f} s: {settings.output}")
    if settings.evaluate:
        weighted = bool(predictor.spec.weight)
        metrics = evaluate_file(settings.output, predictor.labels, weighted=weighted)
        print(json.dumps(to_json(metrics)))
