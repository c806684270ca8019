"""Accuracy of models, compared on the same labelled rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from tqdm import tqdm

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.clicklog.readers.stream import stream_unparsed
from nvt_torchrec.dlrm.metrics import Metrics, compute_metrics
from nvt_torchrec.inference.predictor import Predictor, input_spec

_BLOCK_BYTES = 4 << 20


def metrics_of(
    probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> Metrics:
    """Return the metrics of probabilities float32 [n], labels [n] and perhaps weights [n]."""
    # clip to the smallest and largest float32 between 0 and 1
    x = probabilities.astype(np.float64).clip(1e-38, 1 - 2**-25)
    return compute_metrics(np.log(x) - np.log1p(-x), labels, weights)


def score_labelled(
    predictors: Mapping[str, Predictor],
    path: str,
    file_format: str | None = None,
    most: int | None = None,
) -> dict[str, Metrics]:
    """Return the metrics of several predictors of one label on the same labelled rows, by name.

    It takes about 60 bytes of memory a row.

    Args:
        predictors: Predictors of the same columns, by name.
        path: Path of the log: TSV, CSV or parquet.
        file_format: Its format; None for that of the training log, or parquet if the path ends so.
        most: The number of rows to read, from the first on; None for all.

    Raises:
        SchemaError: The log has no labels, or the predictors predict different ones.
        BadInputError, BadRowError: It has no rows, or malformed ones.
    """
    first = next(iter(predictors.values()))
    for name, predictor in predictors.items():
        if predictor.label != first.label:
            raise SchemaError(
                f"model {name} predicts label {predictor.label}, the first one {first.label}",
                "compare models of the same label",
            )
    spec = input_spec(first.spec, path, file_format)
    pieces = stream_unparsed(path, spec, block_bytes=_BLOCK_BYTES)
    labels: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    scores: dict[str, list[np.ndarray]] = {name: [] for name in predictors}
    taken = 0
    with tqdm(desc="evaluate", unit="rows", unit_scale=True, disable=None) as bar:
        while taken != most and (piece := next(pieces, None)) is not None:
            if not piece.label:
                raise SchemaError(f"{path}: no column {spec.label}", "pass rows with labels")
            rows = piece.parse()
            count = len(rows) if most is None else min(most - taken, len(rows))
            labels.append(first.labels_of(rows)[:count])
            if rows.weight is not None:
                weights.append(rows.weight[:count])
            for name, predictor in predictors.items():
                scores[name].append(predictor.predict_rows(rows)[:count])
            bar.update(count)
            taken += count
    if not taken:
        raise BadInputError(f"{path}: no rows", "pass rows with labels")
    truth = np.concatenate(labels)
    weight = np.concatenate(weights) if weights else None
    return {name: metrics_of(np.concatenate(p), truth, weight) for name, p in scores.items()}


def table(metrics: Mapping[str, Metrics]) -> str:
    """Format a line for each model by its name, and one for each change from the one before."""

    def line(name: str, rows: str, values: Sequence[float | None], sign: str = "") -> str:
        cells = ["-" if value is None else f"{value:{sign}.6f}" for value in values]
        return f"{name:8}{rows:>12}{cells[0]:>12}{cells[1]:>12}{cells[2]:>14}"

    figures = [(model.auroc, model.log_loss, model.calibration) for model in metrics.values()]
    lines = [f"{'':8}{'rows':>12}{'AUROC':>12}{'log loss':>12}{'calibration':>14}"]
    for (name, model), values in zip(metrics.items(), figures, strict=True):
        lines.append(line(name, f"{model.samples:,}", values))
    for before, after in itertools.pairwise(figures):
        pairs = zip(before, after, strict=True)  # None if all labels are equal
        changes = [None if None in pair else pair[1] - pair[0] for pair in pairs]
        lines.append(line("change", "", changes, "+"))
    return "\n".join(lines)
