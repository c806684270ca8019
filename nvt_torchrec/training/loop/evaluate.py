"""Evaluate a model on every row of a split, over all ranks, without affecting its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.models.metrics import ByLabel, compute_metrics, find_groups
from nvt_torchrec.training.data.loaders import TrainBatch
from nvt_torchrec.training.launch.distributed import gather_rows
from nvt_torchrec.training.launch.run_state import RunState
from nvt_torchrec.training.sharding.build import Pipeline


def evaluate(
    pipeline: Pipeline,
    run: RunState,
    batches: Iterator[TrainBatch],
    after_step: Callable[[], None] = lambda: None,
    group_by: str | None = None,
) -> ByLabel | None:
    """Compute a model's metrics over all rows of a pass on all ranks (collective).

    Args:
        pipeline: The training pipeline. It must be empty: batches that it had fetched for
            training would be evaluated instead of trained.
        run: The run of the pipeline; its model is in training mode before and after.
        batches: This rank's batches; each step's batch has the same size on all ranks.
        after_step: A function to call after each batch.
        group_by: The column whose ids group the rows for GAUC; None for no GAUC.

    Returns:
        The metrics of each label on rank 0, None on the others.

    Raises:
        SettingsError: A prediction is not finite (on rank 0).
    """
    groups = [np.zeros(0, np.int64)]
    if group_by:
        batches = _collect_groups(batches, group_by, groups)
    rows = predict(pipeline, run, batches, after_step)
    all_groups = gather_rows(run.group, np.concatenate(groups)) if group_by else None
    if rows is None:
        return None
    all_logits, all_labels, weights = rows
    metrics = {}
    for name, logits, labels in zip(run.config.labels, all_logits, all_labels, strict=True):
        metrics[name] = compute_metrics(logits, labels, weights, all_groups)
    return metrics


def predict(
    pipeline: Pipeline,
    run: RunState,
    batches: Iterator[TrainBatch],
    after_step: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
    """Compute the logits of all rows of a pass on all ranks (collective).

    The arguments and the error are the same as for :func:`evaluate`.

    Returns:
        On rank 0 the logits and the labels, float32 [labels, rows], and the weights, float32 [rows]
        or None if the rows have no weights; the rows are ordered by rank. None on other ranks.
    """
    run.model.eval()
    outputs: list[list[torch.Tensor]] = []
    with torch.no_grad():
        while True:
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                break
            parts = [output.logits, output.labels.float()]
            if output.weights is not None:
                parts.append(output.weights)
            outputs.append(parts)
            after_step()
    run.model.train()
    # Logits, labels and weights (if any) are columns of one matrix, so that the ranks send a single
    # message.
    num_labels = len(run.config.labels)
    rows = torch.zeros(0, 2 * num_labels)
    if outputs:
        rows = torch.column_stack([torch.cat(parts) for parts in zip(*outputs, strict=True)])
    all_rows = gather_rows(run.group, rows.cpu().numpy())
    if all_rows is None:
        return None
    columns = all_rows.T
    logits = columns[:num_labels]
    labels = columns[num_labels : 2 * num_labels]
    weights = columns[2 * num_labels] if len(columns) > 2 * num_labels else None
    num_bad = np.count_nonzero(~np.isfinite(logits).all(0))
    if num_bad:
        raise SettingsError(
            f"{num_bad} of {len(all_rows)} predictions are not finite",
            "if training diverged, lower --learning_rate; if the data hold NaN or infinite values, "
            "correct them",
        )
    return logits, labels, weights


def _collect_groups(
    batches: Iterator[TrainBatch], column: str, groups: list[np.ndarray]
) -> Iterator[TrainBatch]:
    """Yield the batches, and append the group ids of their rows, from a column, to ``groups``."""
    for batch in batches:
        groups.append(find_groups(batch.sparse_features[column].values().cpu().numpy()))
        yield batch
