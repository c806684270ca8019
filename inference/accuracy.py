"""Accuracy of models, compared on the same labelled rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from tqdm import tqdm

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.clicklog.readers.stream import stream_unparsed
from nvt_torchrec.dlrm.metrics import Metrics, compute_metrics
from nvt_torchrec.inference.predictor import Predictor, cut_ids, input_spec
from nvt_torchrec.workflows.compiled.workflow import EncodedRows

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


@dataclasses.dataclass(frozen=True)
class LabelledScores:
    """Scores of the same labelled rows by several models.

    Attributes:
        labels: The labels [n].
        weights: The weights float32 [n]; None if the rows have none.
        scores: By the name of the model, the probabilities float32 [n].
    """

    labels: np.ndarray
    weights: np.ndarray | None
    scores: dict[str, np.ndarray]

    def metrics(self) -> dict[str, Metrics]:
        """Return the metrics of each model by its name."""
        return {
            name: metrics_of(values, self.labels, self.weights)
            for name, values in self.scores.items()
        }


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
) -> LabelledScores:
    """Score the same labelled rows with several predictors of one label.

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
    labels: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    scores: dict[str, list[np.ndarray]] = {name: [] for name in predictors}
    left = most
    with tqdm(desc="evaluate", unit="rows", unit_scale=True, disable=None) as bar:
        for piece in stream_unparsed(path, spec, block_bytes=_BLOCK_BYTES):
            if not piece.label:
                raise SchemaError(f"{path}: no column {spec.label}", "pass rows with labels")
            rows = piece.parse()
            count = len(rows) if left is None else min(left, len(rows))
            labels.append(first.labels_of(rows)[:count])
            if rows.weight is not None:
                weights.append(rows.weight[:count])
            encoded: dict[str, EncodedRows] = {}  # by workflow: they may have the same
            for name, predictor in predictors.items():
                workflow = predictor.workflow
                if workflow.digest not in encoded:
                    encoded[workflow.digest] = workflow.transform(rows)
                own = encoded[workflow.digest]
                dense, ids = own.dense[:, :count], cut_ids(own.ids, 0, count)
                scores[name].append(predictor.predict_encoded(dense, ids))
            bar.update(count)
            if left is not None:
                left -= count
                if not left:
                    break
    truth = np.concatenate(labels or [np.empty(0)])
    if not len(truth):
        raise BadInputError(f"{path}: no rows", "pass rows with labels")
    return LabelledScores(
        truth,
        np.concatenate(weights) if weights else None,
        {name: np.concatenate(parts) for name, parts in scores.items()},
    )


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
    scored = score_labelled(predictors, path, file_format)
    first, metrics = next(iter(scored.scores.values())), scored.metrics()
    return [
        Accuracy(
            tables=kind,
            mebibytes=predictors[kind].model.table.nbytes / 2**20,
            metrics=metrics[kind],
            largest_change=float(np.abs(values - first).max()),
        )
        for kind, values in scored.scores.items()
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
