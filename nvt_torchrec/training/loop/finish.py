"""Finish a training after its last step: fit the bias, and find the columns that matter."""

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

#: The batches of training rows that the bias is fitted to.
_BIAS_BATCHES = 16
#: The rows of such a batch, on all ranks.
_BIAS_ROWS = 8192
#: The values of valid that are scored once for each column to find the columns that matter. This
#: many take seconds.
_IMPORTANCE_VALUES = 2**18
#: Bounds of the number of rows that hold these values.
_MIN_IMPORTANCE_ROWS = 1024
_MAX_IMPORTANCE_ROWS = 16_384
#: Steps of the fit of a bias, of which two suffice.
_NEWTON_STEPS = 4
#: The expected size (standard deviation) of the shift between the mean prediction and the click
#: rate that training leaves behind. It keeps the bias from following a few clicks.
_SHIFT_DEVIATION = 0.05


def make_samples(
    settings: TrainSettings, config: ModelConfig, group: Group, files: tuple[Path, ...] | None
) -> dict[str, KJTLoader]:
    """Return loaders of the rows of train and valid that finish a training.

    They are opened before training, because a day may be added meanwhile. No row is left out by its
    label.

    Args:
        settings: The settings of the run.
        config: The model.
        group: This rank.
        files: The files of train that the run reads; None for all.
    """
    every_row: dict[str, Any] = {"undersampling_rate": None}
    settings = dataclasses.replace(settings, **every_row)
    rows = _IMPORTANCE_VALUES // (len(config.dense) + len(config.features))
    rows = min(max(rows, _MIN_IMPORTANCE_ROWS), _MAX_IMPORTANCE_ROWS)
    return {
        "train": make_sample(settings, config, "train", group, _BIAS_BATCHES, _BIAS_ROWS, files),
        "valid": make_sample(settings, config, "valid", group, 1, rows),
    }


def fit_bias(loader: KJTLoader, pipeline: Pipeline, run: RunState) -> None:
    """Fit the bias of each label, in the linear term, to the rows of a loader (collective).

    The last batches move the mean prediction, on small logs by some percent. Adding one number to
    the logits changes no ranking, and makes the mean prediction of the rows equal to their click
    rate.
    """
    biases = [
        parameter
        for name, parameter in run.model.named_parameters()
        if name.endswith("first_order.bias")
    ]
    if not biases:
        return
    (bias,) = biases
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

    It is found by Newton's method; the deviation is ``_SHIFT_DEVIATION``. Weights are scaled to sum
    to their effective number (``Metrics.effective_counts``).
    """
    scale = np.ones(len(labels))
    if weights is not None and weights.any():
        scale = weights * (weights.sum(dtype=float) / np.square(weights, dtype=float).sum())
    shift = 0.0
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-(logits.astype(np.float64) + shift)))
        slope = scale @ (p - labels) + shift / _SHIFT_DEVIATION**2
        curvature = scale @ (p * (1 - p)) + 1 / _SHIFT_DEVIATION**2
        shift -= slope / curvature
    return shift


def measure_importance(
    loader: KJTLoader, pipeline: Pipeline, run: RunState
) -> dict[str, dict[str, float]]:
    """Measure by how much the AUROC falls if the values of a column are permuted (collective).

    The rows are those of the loader's first batch. It is permutation importance (Breiman 2001,
    "Random Forests", §10): of two columns with the same information, each appears unimportant.

    Returns:
        On rank 0, for each label that has an AUROC, the loss of each column by its name.
    """
    config = run.config

    def measure_areas(batch: TrainBatch) -> dict[str, float]:
        areas = {}
        for label, metrics in (evaluate(pipeline, run, iter([batch])) or {}).items():
            if metrics.auroc is not None:
                areas[label] = metrics.auroc
        return areas

    batch = next(pad_batches(loader, run.group), None)
    if batch is None:
        return {}
    areas = measure_areas(batch)
    losses: dict[str, dict[str, float]] = {label: {} for label in areas}
    names = *config.dense, *config.features, *config.vector_bounds
    for number, name in enumerate(names):
        order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(number))
        padding = torch.arange(batch.rows, len(batch.labels))
        permuted = _permute_column(batch, name, config, torch.cat([order, padding]))
        permuted_areas = measure_areas(permuted)
        for label in areas:
            losses[label][name] = areas[label] - permuted_areas[label]
    return losses


def _permute_column(
    batch: TrainBatch, name: str, config: ModelConfig, order: torch.Tensor
) -> TrainBatch:
    """Return a batch whose rows have the values of other rows in one column.

    Args:
        batch: The batch.
        name: The column.
        config: The model.
        order: int64 [B], for each row the one whose value it gets.
    """
    order = order.to(batch.labels.device)
    if name in config.dense:
        dense, column = batch.dense_features.clone(), config.dense.index(name)
        dense[:, column] = dense[order, column]
        return dataclasses.replace(batch, dense_features=dense)
    bounds = config.vector_bounds
    if name in bounds:
        assert batch.dense_vectors is not None
        permuted, inputs = batch.dense_vectors.clone(), slice(*bounds[name])
        permuted[:, inputs] = batch.dense_vectors[order, inputs]
        return dataclasses.replace(batch, dense_vectors=permuted)
    # A copy, because TorchRec caches the dict: the next column would be changed beside this one.
    columns = dict(batch.sparse_features.to_dict())
    for key in config.list_keys(name):
        lengths = columns[key].lengths()
        rows = columns[key].values().split(lengths.tolist())
        values = torch.cat([rows[row] for row in order.tolist()])
        columns[key] = JaggedTensor(values, lengths=lengths[order])
    return dataclasses.replace(batch, sparse_features=KeyedJaggedTensor.from_jt_dict(columns))
