"""What smaller tables cost: the same labelled rows through the model with each."""

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
    """Of a model with one type of tables.

    Attributes:
        tables: the type.
        mebibytes: that the tables take.
        metrics: over all rows.
        largest_change: of any probability, from that with the first type.
    """

    tables: str
    mebibytes: float
    metrics: Metrics
    largest_change: float


def metrics_of(probabilities: np.ndarray, labels: np.ndarray) -> Metrics:
    """Metrics of probabilities float32 [n] and labels [n]."""
    # as far from 0 and 1 as float32 tells numbers apart
    x = probabilities.astype(np.float64).clip(1e-38, 1 - 2**-25)
    return compute_metrics(np.log(x) - np.log1p(-x), labels)


def compare(
    predictors: Mapping[str, Predictor], path: str, file_format: str | None = None
) -> list[Accuracy]:
    """Score a labelled raw log with each; takes about 60 bytes of memory a row.

    Args:
        predictors: by the type of their tables, of the same workflow; the first is the reference.
        path: of the log: TSV, CSV or parquet.
        file_format: which of them; None: the training log's, or parquet if it is called so.

    Raises:
        SchemaError: the log has no labels.
        BadInputError, BadRowError: it has no rows, or malformed ones.
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
        raise BadInputError(f"{path}: there are no rows", "pass rows with labels")
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
    """A line for each, the first the reference."""
    lines = [
        f"{'tables':8}{'MiB':>12}{'AUROC':>10}{'change':>11}{'log loss':>10}{'change':>11}"
        f"{'largest change of p':>21}"
    ]
    first = found[0].metrics
    for one in found:
        columns = [f"{one.tables:8}{one.mebibytes:>12,.1f}"]
        for key in ("auroc", "log_loss"):
            value, reference = getattr(one.metrics, key), getattr(first, key)
            if value is None:  # all labels are equal
                columns.append(f"{'-':>10}{'-':>11}")
            else:
                columns.append(f"{value:>10.6f}{value - reference:>+11.6f}")
        lines.append("".join([*columns, f"{one.largest_change:>21.6f}"]))
    return "\n".join(lines)
