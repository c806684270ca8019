"""What a model must beat: always predicting the click rate, and logistic regression.

A loss alone says nothing. The regression has a weight for each value of each categorical column and
for each dense column, regularized as scikit-learn's is by default, and is fitted on rank 0 to a
sample of the rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from scipy import optimize, sparse
from torch import distributed as dist

from nvt_torchrec.base.auroc import column_auroc
from nvt_torchrec.dlrm.config import ModelConfig
from nvt_torchrec.dlrm.data import make_loader
from nvt_torchrec.dlrm.launch.distributed import Group
from nvt_torchrec.dlrm.metrics import Metrics, compute_metrics
from nvt_torchrec.dlrm.reporting.metrics_log import CLICK_RATE, REGRESSION
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from nvt_torchrec.nvt_loader.selection import Selection

#: The rows of a sample are read in so many batches, of so many rows.
_BATCHES, _BATCH = 12, 8192
_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches")
#: A dense column is cut at these for the AUROC that it has alone.
_QUANTILES = np.linspace(0, 1, 33)
#: Steps of the fit: more changed the AUROC by less than 0.001 on the logs of bench-quality.
_MOST_STEPS = 25


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Rows of a split: their dense values, ids as a sparse matrix of ones, labels and weights."""

    dense: np.ndarray
    ids: sparse.csr_array
    labels: np.ndarray
    weights: np.ndarray | None


def compute_baselines(
    settings: TrainSettings, config: ModelConfig, training: Selection | None
) -> dict[tuple[str, str], Metrics]:
    """Fit the baselines to training rows; return their metrics by split and name.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        training: The part of the training set that the run reads.
    """
    fitted = _read(settings, config, "train", training)
    clicks = np.average(fitted.labels, weights=fitted.weights) if len(fitted.labels) else 0.0
    if not 0 < clicks < 1:
        return {}
    seen = np.unique(fitted.ids.indices)  # the other columns have no weight
    weights = _fit(_features(fitted, seen), fitted.labels, fitted.weights)
    # of the whole log, as the model's logits are
    offset = np.log(settings.undersampling_rate or 1.0)
    weights[-1] += offset
    metrics = {}
    for split in ("valid", "test"):
        rows = _read(settings, config, split)
        constant = np.full(len(rows.labels), np.log(clicks / (1 - clicks)) + offset)
        logits = _features(rows, seen) @ weights
        for name, scores in ((CLICK_RATE, constant), (REGRESSION, logits)):
            metrics[split, name] = compute_metrics(scores, rows.labels, rows.weights)
    return metrics


def best_column(settings: TrainSettings, config: ModelConfig, split: str) -> tuple[str, float]:
    """Return the column that has the largest AUROC alone, in a sample of a split, and the AUROC."""
    rows = _read(settings, config, split)
    ids, starts = rows.ids.tocoo(), np.cumsum([0, *config.num_embeddings])
    found = {}
    for name, first, end in zip(config.categorical, starts, starts[1:], strict=False):
        mine = (ids.col >= first) & (ids.col < end)
        with_ids, row = np.unique(ids.row[mine], return_inverse=True)
        found[name] = column_auroc(pa.array(ids.col[mine]), rows.labels[with_ids], row)
    for name, values in zip(config.dense, rows.dense.T, strict=True):
        cuts = np.quantile(values, _QUANTILES)  # each is a value of its own, as of a filled column
        places = np.searchsorted(cuts, values) + np.searchsorted(cuts, values, "right")
        found[name] = column_auroc(pa.array(places), rows.labels)
    best = max(found, key=lambda name: found[name] or 0.0)
    return best, found[best] or 0.0


def _read(
    settings: TrainSettings, config: ModelConfig, split: str, selection: Selection | None = None
) -> _Sample:
    changes: dict[str, Any] = {**dict.fromkeys(_LIMITS, _BATCHES), "loader": None}
    changes |= {"batch_size": _BATCH, "test_batch_size": _BATCH, "shuffle_training_set": True}
    settings = dataclasses.replace(settings, **changes)
    alone = Group(0, 1, 1, torch.device("cpu"), dist.GroupMember.WORLD)  # type: ignore[arg-type]
    starts = torch.tensor([0, *np.cumsum(config.num_embeddings)])
    parts = []
    for batch in make_loader(settings, config, split, alone, selection):
        features = batch.sparse_features
        size, count = len(batch.labels), len(features.keys())
        lengths = features.lengths().long()
        rows = torch.arange(size).repeat(count).repeat_interleave(lengths)
        columns = starts[:-1].repeat_interleave(lengths.view(count, size).sum(1))
        columns += features.values().long()
        ids = sparse.csr_array(
            (np.ones(len(rows)), (rows.numpy(), columns.numpy())), (size, int(starts[-1]))
        )
        parts.append((batch.dense_features.numpy(), ids, batch.labels.numpy(), batch.weights))
    if not parts:
        empty = np.zeros(0)
        return _Sample(np.zeros((0, len(config.dense))), sparse.csr_array((0, 0)), empty, None)
    dense, ids, labels, weights = zip(*parts, strict=True)
    return _Sample(
        np.concatenate(dense),
        sparse.vstack(ids, format="csr"),
        np.concatenate(labels),
        None if weights[0] is None else torch.cat(weights).numpy(),
    )


def _features(sample: _Sample, seen: np.ndarray) -> sparse.csr_array:
    """Return the regression's inputs: the ids that training rows have, dense values, and 1."""
    ids = sample.ids[:, seen] if len(sample.labels) else sparse.csr_array((0, len(seen)))
    more = np.column_stack([sample.dense, np.ones(len(sample.labels))])
    return sparse.hstack([ids, sparse.csr_array(more)], format="csr")


def _fit(x: sparse.csr_array, labels: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Return the weights of least Σ loss + ½ Σ weight², but for the last one, which is free."""
    scale = np.ones(len(labels)) if weights is None else weights / weights.mean()
    rate = np.average(labels, weights=weights)
    # in units of which every weight has a similar curvature, so that few steps are enough
    unit = 1 / np.sqrt(1 + rate * (1 - rate) * (x.power(2).T @ scale))
    x = x @ sparse.diags_array(unit)
    penalty = np.append(unit[:-1] ** 2, 0.0)

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        logits = x @ w
        losses = np.logaddexp(0, logits) - labels * logits
        slopes = scale * (1 / (1 + np.exp(-logits)) - labels)
        return scale @ losses + penalty @ w**2 / 2, x.T @ slopes + penalty * w

    start = np.zeros(x.shape[1])
    options = {"maxiter": _MOST_STEPS}
    return unit * optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x
