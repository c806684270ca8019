"""Accuracy of models, compared on the same labelled rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from tqdm import tqdm

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.clicklog.readers.stream import stream_unparsed
from nvt_torchrec.dlrm.metrics import Metrics, compute_metrics
from nvt_torchrec.inference.predictor import Predictor, cut_ids, input_spec
from nvt_torchrec.workflows.compiled.workflow import EncodedRows

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
            encoded: dict[str, EncodedRows] = {}  # by workflow: they may have the same
            for name, predictor in predictors.items():
                workflow = predictor.workflow
                if workflow.digest not in encoded:
                    encoded[workflow.digest] = workflow.transform(rows)
                features = encoded[workflow.digest]
                dense, ids = features.dense[:, :count], cut_ids(features.ids, 0, count)
                scores[name].append(predictor.predict_encoded(dense, ids))
            bar.update(count)
            taken += count
    if not taken:
        raise BadInputError(f"{path}: no rows", "pass rows with labels")
    truth = np.concatenate(labels)
    weight = np.concatenate(weights) if weights else None
    return {name: metrics_of(np.concatenate(p), truth, weight) for name, p in scores.items()}


def table(metrics: Mapping[str, Metrics]) -> str:
    """Format a line for each model by its name, and one for each change from the one before."""
    lines = [f"{'':8}{'rows':>12}" + "".join(f"{name:>{width}}" for name, _, width in _COLUMNS)]
    for name, model in metrics.items():
        lines.append(f"{name:8}{model.samples:>12,}{_cells(model, None)}")
    for before, after in itertools.pairwise(metrics.values()):
        lines.append(f"{'change':8}{'':12}{_cells(after, before)}")
    return "\n".join(lines)


#: Title, attribute of :class:`Metrics` and width.
_COLUMNS = (
    ("AUROC", "auroc", 12),
    ("log loss", "log_loss", 12),
    ("calibration", "calibration", 14),
)


def _cells(model: Metrics, before: Metrics | None) -> str:
    cells = []
    for _, key, width in _COLUMNS:
        value, reference = getattr(model, key), 0 if before is None else getattr(before, key)
        known = value is not None and reference is not None  # not if all labels are equal
        sign = "" if before is None else "+"
        cells.append(f"{value - reference:>{sign}{width}.6f}" if known else f"{'-':>{width}}")
    return "".join(cells)
