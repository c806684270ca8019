"""Finish a training after its last step: fit the bias, and measure which columns matter."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.data.loaders import TrainBatch, make_sample, pad_batches
from nvt_torchrec.training.launch.distributed import Group, broadcast_object
from nvt_torchrec.training.launch.run_state import RunState
from nvt_torchrec.training.loop.evaluate import evaluate, predict
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.build import Pipeline

log = logging.getLogger(__name__)

#: The number of batches of training rows that the bias is fitted to.
_BIAS_BATCHES = 16
#: The number of rows of such a batch, over all ranks.
_BIAS_ROWS = 8192
#: The number of values of valid that are scored once per column to measure importance. Scoring them
#: takes seconds.
_IMPORTANCE_VALUES = 2**18
#: Bounds of the number of rows that hold these values.
_MIN_IMPORTANCE_ROWS = 1024
_MAX_IMPORTANCE_ROWS = 16_384
#: Newton steps of the fit of a bias; two suffice.
_NEWTON_STEPS = 4
#: The expected standard deviation of the shift between mean prediction and click rate after
#: training, in logits. As a prior it keeps the bias from following a few clicks.
_SHIFT_DEVIATION = 0.05


def make_samples(
    settings: TrainSettings, config: ModelConfig, group: Group, files: tuple[Path, ...] | None
) -> dict[str, KJTLoader]:
    """Return loaders of the samples of train and valid that finish a training.

    They are opened before training, because the ETL may add a day meanwhile. They read rows of both
    labels without undersampling.

    Args:
        settings: The settings of the run.
        config: The model.
        group: This rank.
        files: The files of train that the run reads; None for all.
    """
    changes: dict[str, Any] = {"undersampling_rate": None}
    settings = dataclasses.replace(settings, **changes)
    rows = _IMPORTANCE_VALUES // (len(config.dense) + len(config.features))
    rows = min(max(rows, _MIN_IMPORTANCE_ROWS), _MAX_IMPORTANCE_ROWS)
    return {
        "train": make_sample(settings, config, "train", group, _BIAS_BATCHES, _BIAS_ROWS, files),
        "valid": make_sample(settings, config, "valid", group, 1, rows),
    }


def fit_bias(loader: KJTLoader, pipeline: Pipeline, run: RunState) -> None:
    """Fit the linear term's bias of each label to the rows of a loader (collective).

    The last batches move the mean prediction, on small logs by several percent. Adding a constant
    to the logits changes no ranking, and brings the mean prediction to the click rate of the rows.
    """
    bias = None
    for name, parameter in run.model.named_parameters():
        if name.endswith("first_order.bias"):
            bias = parameter
    if bias is None:  # a model without a linear term
        return
    shifts: list[float] = []
    predicted = predict(pipeline, run, pad_batches(loader, run.group))
    if predicted is not None:
        all_logits, all_labels, weights = predicted
        for logits, labels in zip(all_logits, all_labels, strict=True):
            shifts.append(find_shift(logits, labels, weights))
        log.info("bias %s, fitted to training rows", ", ".join(f"{s:+.4f}" for s in shifts))
    with torch.no_grad():
        bias.add_(torch.tensor(broadcast_object(run.group, shifts)).to(bias))


def find_shift(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None) -> float:
    """Return the shift s of the logits that minimizes Σ loss(logits + s) + ½ (s / deviation)².

    The deviation is ``_SHIFT_DEVIATION``. Weights are scaled to sum to the effective number of rows
    (``Metrics.effective_counts``).
    """
    scale = np.ones(len(labels))
    if weights is not None and weights.any():
        scale = weights * (weights.sum(dtype=float) / np.square(weights, dtype=float).sum())
    shift = 0.0
    for _ in range(_NEWTON_STEPS):  # Newton's method
        p = 1 / (1 + np.exp(-(logits.astype(np.float64) + shift)))
        slope = scale @ (p - labels) + shift / _SHIFT_DEVIATION**2
        curvature = scale @ (p * (1 - p)) + 1 / _SHIFT_DEVIATION**2
        shift -= slope / curvature
    return shift


def measure_importance(
    loader: KJTLoader, pipeline: Pipeline, run: RunState
) -> dict[str, dict[str, float]]:
    """Measure how much the AUROC drops when the values of a column are permuted (collective).

    The rows are the loader's first batch. This is permutation importance (Breiman 2001, "Random
    Forests", §10); if two columns hold the same information, each appears unimportant.

    Returns:
        On rank 0, for each label that has an AUROC, the drop of the AUROC by column name.
    """
    config = run.config

    def measure_aurocs(batch: TrainBatch) -> dict[str, float]:
        aurocs = {}
        metrics_by_label = evaluate(pipeline, run, iter([batch])) or {}
        for label, metrics in metrics_by_label.items():
            if metrics.auroc is not None:
                aurocs[label] = metrics.auroc
        return aurocs

    batch = next(pad_batches(loader, run.group), None)
    if batch is None:
        return {}
    aurocs = measure_aurocs(batch)
    drops: dict[str, dict[str, float]] = {label: {} for label in aurocs}
    columns = *config.dense, *config.features, *config.vector_bounds
    for i, column in enumerate(columns):
        order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(i))
        padding = torch.arange(batch.rows, len(batch.labels))
        permuted = _permute_column(batch, column, config, torch.cat([order, padding]))
        permuted_aurocs = measure_aurocs(permuted)
        for label in aurocs:
            drops[label][column] = aurocs[label] - permuted_aurocs[label]
    return drops


def _permute_column(
    batch: TrainBatch, name: str, config: ModelConfig, order: torch.Tensor
) -> TrainBatch:
    """Return a batch with the values of one column permuted between the rows.

    Args:
        batch: The batch.
        name: The column.
        config: The model.
        order: int64 [B], for each row the index of the row whose value it gets.
    """
    order = order.to(batch.labels.device)
    if name in config.dense:
        dense = batch.dense_features.clone()
        index = config.dense.index(name)
        dense[:, index] = dense[order, index]
        return dataclasses.replace(batch, dense_features=dense)
    bounds = config.vector_bounds
    if name in bounds:
        assert batch.dense_vectors is not None
        permuted = batch.dense_vectors.clone()
        inputs = slice(*bounds[name])
        permuted[:, inputs] = batch.dense_vectors[order, inputs]
        return dataclasses.replace(batch, dense_vectors=permuted)
    # TorchRec caches the dict. Without a copy, this column would stay permuted for the next one.
    columns = dict(batch.sparse_features.to_dict())
    for key in config.list_keys(name):
        lengths = columns[key].lengths()
        rows = columns[key].values().split(lengths.tolist())
        values = torch.cat([rows[row] for row in order.tolist()])
        columns[key] = JaggedTensor(values, lengths=lengths[order])
    return dataclasses.replace(batch, sparse_features=KeyedJaggedTensor.from_jt_dict(columns))
