"""Evaluation of every row of a split once, over all ranks, without an effect on training.

And what is found by it when training has ended: the bias, and the columns that matter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.dlrm.build import Pipeline
from nvt_torchrec.dlrm.data import padded_batches
from nvt_torchrec.dlrm.launch.distributed import Group, from_rank_0, gather_rows
from nvt_torchrec.dlrm.metrics import ByLabel, compute_metrics, groups_of
from nvt_torchrec.dlrm.model import TrainBatch
from nvt_torchrec.dlrm.models.config import ModelConfig
from nvt_torchrec.nvt_loader import KJTLoader

log = logging.getLogger(__name__)

#: Steps of the fit of a bias, of which two suffice.
_STEPS = 4
#: Standard deviation of the shift that training leaves behind; few clicks change the bias less.
_SHIFT = 0.05


def evaluate(
    pipeline: Pipeline,
    model: torch.nn.Module,
    batches: Iterator[TrainBatch],
    labels: Sequence[str],
    group: Group,
    after_step: Callable[[], None],
    group_by: str | None = None,
) -> ByLabel | None:
    """Compute the metrics of ``model`` over all rows of a pass on all ranks (collective).

    Args:
        pipeline: The training pipeline. It must be empty: batches that it had fetched for
            training would be evaluated instead of trained.
        model: The model in the pipeline; it is in training mode before and after.
        batches: The batches, in each step of the same size on all ranks.
        labels: The names of the labels in the batches.
        group: This rank.
        after_step: A function that is called after each batch.
        group_by: The column whose ids group the rows for GAUC.

    Returns:
        The metrics of each label on rank 0, None on the others.

    Raises:
        SettingsError: A prediction is not finite (on rank 0).
    """
    groups = [np.zeros(0, np.int64)]
    if group_by:
        batches = _collect(batches, group_by, groups)
    rows = predict(pipeline, model, batches, len(labels), group, after_step)
    all_groups = gather_rows(group, np.concatenate(groups)) if group_by else None
    if rows is None:
        return None
    logits, truth, weights = rows
    rest = weights, all_groups
    each = zip(labels, logits, truth, strict=True)
    return {label: compute_metrics(scores, values, *rest) for label, scores, values in each}


def predict(
    pipeline: Pipeline,
    model: torch.nn.Module,
    batches: Iterator[TrainBatch],
    count: int,
    group: Group,
    after_step: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
    """Return logits and labels [count, rows] and weights [rows] of all ranks' rows (collective).

    The arguments, and the error, are those of :func:`evaluate`; there are ``count`` labels.

    Returns:
        Float32, in the order of the ranks, on rank 0; None on the others. Weights are None if rows
        have none.
    """
    model.eval()
    outputs: list[list[torch.Tensor]] = []
    with torch.no_grad():
        while True:
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                break
            more = [] if output.weights is None else [output.weights]
            outputs.append([output.logits, output.labels.float(), *more])
            after_step()
    model.train()
    rows = torch.zeros(0, 2 * count)
    if outputs:
        rows = torch.column_stack([torch.cat(parts) for parts in zip(*outputs, strict=True)])
    all_rows = gather_rows(group, rows.cpu().numpy())
    if all_rows is None:
        return None
    logits, truth, weights = (part.T for part in np.split(all_rows, [count, 2 * count], axis=1))
    bad = np.count_nonzero(~np.isfinite(logits).all(0))
    if bad:
        raise SettingsError(
            f"{bad} of {len(all_rows)} predictions are not finite",
            "training diverged: lower --learning_rate; or the data hold values that are not finite",
        )
    return logits, truth, weights[0] if len(weights) else None


def fit_bias(
    loader: KJTLoader,
    pipeline: Pipeline,
    model: torch.nn.Module,
    config: ModelConfig,
    group: Group,
) -> None:
    """Fit the bias of each label, in the first-order term, to the rows of a loader (collective).

    The last batches move the mean prediction, on small logs by some percent. Adding one number to
    the logit changes no ranking, and lets the mean prediction of the rows be their click rate.
    """
    named = model.named_parameters()
    bias = next((value for name, value in named if name.endswith("first_order.bias")), None)
    if bias is None:
        return
    shifts: list[float] = []
    batches = padded_batches(loader, group)
    if rows := predict(pipeline, model, batches, len(config.labels), group):
        logits, labels, weights = rows
        shifts = [find_shift(*pair, weights) for pair in zip(logits, labels, strict=True)]
        log.info("bias + %s, fitted to training rows", ", ".join(f"{s:.4f}" for s in shifts))
    with torch.no_grad():
        bias.add_(torch.tensor(from_rank_0(group, shifts)).to(bias))


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
    loader: KJTLoader,
    pipeline: Pipeline,
    model: torch.nn.Module,
    config: ModelConfig,
    group: Group,
) -> dict[str, dict[str, float]]:
    """Return by how much the AUROC of a loader's first batch falls when a column changes its rows.

    Collective.

    It is permutation importance (Breiman 2001, "Random Forests", §10). Columns that say the same
    hide each other.

    Returns:
        The loss of each column by its name, for each label that has an AUROC; on rank 0.
    """

    def areas(changed: TrainBatch) -> dict[str, float]:
        found = evaluate(pipeline, model, iter([changed]), config.labels, group, lambda: None)
        return {label: m.auroc for label, m in (found or {}).items() if m.auroc is not None}

    batch = next(padded_batches(loader, group), None)
    if batch is None:
        return {}
    whole = areas(batch)
    lost: dict[str, dict[str, float]] = {label: {} for label in whole}
    for number, name in enumerate((*config.dense, *config.categorical)):
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
    ids, number = batch.sparse_features, config.categorical.index(name)
    lengths, values = ids.lengths().view(-1, len(order)).clone(), ids.values().clone()
    ends = lengths[number].cumsum(0)
    starts, counts = (ends - lengths[number])[order], lengths[number][order]
    places = torch.arange(len(ids[name].values()), device=order.device)
    places = places + (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    first = int(lengths[:number].sum())
    values[first : first + len(places)] = values[first + places]
    lengths[number] = counts
    moved = KeyedJaggedTensor(ids.keys(), values, lengths=lengths.flatten(), stride=len(order))
    return TrainBatch(batch.dense_features, moved, *rest)


def _collect(
    batches: Iterator[TrainBatch], column: str, groups: list[np.ndarray]
) -> Iterator[TrainBatch]:
    """Append the groups of the rows by a column to ``groups``."""
    for batch in batches:
        groups.append(groups_of(batch.sparse_features[column].values().cpu().numpy()))
        yield batch
