"""What follows the last step: the bias is fitted, and the columns that matter are found."""

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
from nvt_torchrec.training.data.loaders import TrainBatch, make_sample, padded_batches
from nvt_torchrec.training.launch.distributed import Group, from_rank_0
from nvt_torchrec.training.launch.run_state import RunState
from nvt_torchrec.training.loop.evaluate import evaluate, predict
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.build import Pipeline

log = logging.getLogger(__name__)

#: The training rows that the bias is fitted to: batches, and the rows of each on all ranks.
_BIAS_BATCHES, _BIAS_ROWS = 16, 8192
#: The values of valid that are scored to find the columns that matter, which take seconds.
_VALUES = 2**18
#: The rows that these are, at least and at most.
_MIN_ROWS, _MAX_ROWS = 1024, 16_384
#: Steps of the fit of a bias, of which two suffice.
_STEPS = 4
#: Standard deviation of the shift that training leaves behind; few clicks change the bias less.
_SHIFT = 0.05


def make_samples(
    settings: TrainSettings, config: ModelConfig, group: Group, files: tuple[Path, ...] | None
) -> dict[str, KJTLoader]:
    """Return loaders of the rows of train (of some of its ``files``) and valid that are looked at.

    They are opened before training, as a day may be added meanwhile. No row is left out by its
    label.
    """
    every_row: dict[str, Any] = {"undersampling_rate": None}
    settings = dataclasses.replace(settings, **every_row)
    rows = _VALUES // (len(config.dense) + len(config.features))
    rows = min(max(rows, _MIN_ROWS), _MAX_ROWS)
    of_train = _BIAS_BATCHES, _BIAS_ROWS, files
    return {
        "train": make_sample(settings, config, "train", group, *of_train),
        "valid": make_sample(settings, config, "valid", group, 1, rows),
    }


def fit_bias(loader: KJTLoader, pipeline: Pipeline, run: RunState) -> None:
    """Fit the bias of each label, in the first-order term, to the rows of a loader (collective).

    The last batches move the mean prediction, on small logs by some percent. Adding one number to
    the logit changes no ranking, and lets the mean prediction of the rows be their click rate.
    """
    named = run.model.named_parameters()
    bias = next((value for name, value in named if name.endswith("first_order.bias")), None)
    if bias is None:
        return
    shifts: list[float] = []
    found = predict(pipeline, run, padded_batches(loader, run.group))
    if found is not None:
        all_logits, all_labels, weights = found
        for logits, labels in zip(all_logits, all_labels, strict=True):
            shifts.append(find_shift(logits, labels, weights))
        log.info("bias %s, fitted to training rows", ", ".join(f"{s:+.4f}" for s in shifts))
    with torch.no_grad():
        bias.add_(torch.tensor(from_rank_0(run.group, shifts)).to(bias))


def find_shift(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None) -> float:
    """Return the s with the least Σ loss of logits + s, + ½ (s / _SHIFT)², by Newton's method.

    Weights are scaled to sum to their effective number (``Metrics.effective_counts``).
    """
    scale = np.ones(len(labels))
    if weights is not None and weights.any():
        scale = weights * (weights.sum(dtype=float) / np.square(weights, dtype=float).sum())
    shift = 0.0
    for _ in range(_STEPS):
        p = 1 / (1 + np.exp(-(logits.astype(np.float64) + shift)))
        slope = scale @ (p - labels) + shift / _SHIFT**2
        shift -= slope / (scale @ (p * (1 - p)) + 1 / _SHIFT**2)
    return shift


def column_importance(
    loader: KJTLoader, pipeline: Pipeline, run: RunState
) -> dict[str, dict[str, float]]:
    """Return by how much the AUROC of a loader's first batch falls when a column changes its rows.

    Collective.

    It is permutation importance (Breiman 2001, "Random Forests", §10). Columns that say the same
    hide each other.

    Returns:
        The loss of each column by its name, for each label that has an AUROC; on rank 0.
    """
    config = run.config

    def areas(changed: TrainBatch) -> dict[str, float]:
        found = evaluate(pipeline, run, iter([changed]))
        return {label: m.auroc for label, m in (found or {}).items() if m.auroc is not None}

    batch = next(padded_batches(loader, run.group), None)
    if batch is None:
        return {}
    whole = areas(batch)
    lost: dict[str, dict[str, float]] = {label: {} for label in whole}
    for number, name in enumerate((*config.dense, *config.features)):
        order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(number))
        padding = torch.arange(batch.rows, len(batch.labels))
        changed = areas(_reordered(batch, name, config, torch.cat([order, padding])))
        for label in whole:
            lost[label][name] = whole[label] - changed[label]
    return lost


def _reordered(
    batch: TrainBatch, name: str, config: ModelConfig, order: torch.Tensor
) -> TrainBatch:
    """Return a batch in which the values of a column are those of other rows."""
    order = order.to(batch.labels.device)
    rest = batch.labels, batch.weights, batch.rows, batch.global_size
    if name in config.dense:
        dense, column = batch.dense_features.clone(), config.dense.index(name)
        dense[:, column] = dense[order, column]
        return TrainBatch(dense, batch.sparse_features, *rest)
    # a copy: TorchRec keeps the dict, and the next column would be changed beside this one
    columns = dict(batch.sparse_features.to_dict())
    for key in config.keys_of(name):
        lengths = columns[key].lengths()
        rows = columns[key].values().split(lengths.tolist())
        values = torch.cat([rows[row] for row in order.tolist()])
        columns[key] = JaggedTensor(values, lengths=lengths[order])
    return TrainBatch(batch.dense_features, KeyedJaggedTensor.from_jt_dict(columns), *rest)
