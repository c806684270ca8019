"""Accuracy of a model with float16 or int8 tables, compared on the same labelled rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from tqdm import tqdm

from clicklog.errors import BadInputError, SchemaError
from clicklog.readers.stream import stream_unparsed
from dlrm.metrics import Metrics, compute_metrics
from inference.predictor import Predictor, input_spec

_BLOCK_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The accuracy of a model with one type of tables.

    Attributes:
        tables: The type.
        mebibytes: The size of the tables.
        metrics: Metrics over all rows.
        largest_change: The largest difference of a probability from that with the first type.
    """

    tables: str
    mebibytes: float
    metrics: Metrics
    largest_change: float


def metrics_of(probabilities: np.ndarray, labels: np.ndarray) -> Metrics:
    """Return the metrics of probabilities float32 [n] and labels [n]."""
    # clip to the smallest and largest float32 between 0 and 1
    x = probabilities.astype(np.float64).clip(1e-38, 1 - 2**-25)
    return compute_metrics(np.log(x) - np.log1p(-x), labels)


def compare(
    predictors: Mapping[str, Predictor], path: str, file_format: str | None = None
) -> list[Accuracy]:
    """Score a labelled raw log with each predictor. Takes about 60 bytes of memory a row.

    Args:
        predictors: Predictors of one workflow by the type of their tables; the first is the
            reference.
        path: Path of the log: TSV, CSV or parquet.
        file_format: Its format; None for that of the training log, or parquet if the path ends so.

    Raises:
        SchemaError: The log has no labels.
        BadInputError, BadRowError: It has no rows, or malformed ones.
    """
    workflow = next(iter(predictors.values())).workflow
    spec = input_spec(workflow.spec, path, file_format)
    labels: list[np.ndarray] = []
    scores: dict[str, list[np.ndarray]] = {kind: [] for kind in predictors}
    with tqdm(desc="evaluate", unit="rows", unit_scale=True, disable=None) as bar:
        for piece in stream_unparsed(path, spec, block_bytes=_BLOCK_BYTES):
            if not piece.label:
                raise SchemaError(f"{path}: no column {spec.label}", "pass rows with labels")
            rows = piece.parse()
            encoded = workflow.transform(rows)
            labels.append(rows.label)
            for kind, predictor in predictors.items():
                scores[kind].append(predictor.predict_encoded(encoded.dense, encoded.ids))
            bar.update(len(rows))
    truth = np.concatenate(labels or [np.empty(0)])
    if not len(truth):
        raise BadInputError(f"{path}: no rows", "pass rows with labels")
    joined = {kind: np.concatenate(parts) for kind, parts in scores.items()}
    first = next(iter(joined.values()))
    return [
        Accuracy(
            tables=kind,
            mebibytes=predictors[kind].model.table.nbytes / 2**20,
            metrics=metrics_of(values, truth),
            largest_change=float(np.abs(values - first).max()),
        )
        for kind, values in joined.items()
    ]


def table(found: list[Accuracy]) -> str:
    """Format a line for each type of tables; the first is the reference."""
    lines = [
        f"{'tables':8}{'MiB':>12}{'AUROC':>10}{'change':>11}{'log loss':>10}{'change':>11}"
        f"{'largest change of p':>21}"
    ]
    first = found[0].metrics
    for row in found:
        columns = [f"{row.tables:8}{row.mebibytes:>12,.1f}"]
        for key in ("auroc", "log_loss"):
            value, reference = getattr(row.metrics, key), getattr(first, key)
            if value is None:  # all labels are equal
                columns.append(f"{'-':>10}{'-':>11}")
            else:
                columns.append(f"{value:>10.6f}{value - reference:>+11.6f}")
        lines.append("".join([*columns, f"{row.largest_change:>21.6f}"]))
    return "\n".join(lines)
