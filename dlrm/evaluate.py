"""Evaluation: every row of a split once, metrics over all ranks, training left undisturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist

from clicklog.errors import SettingsError
from dlrm.launch.distributed import Group, gather_rows
from dlrm.metrics import Metrics, compute_metrics
from dlrm.model import Scorer, TrainBatch
from dlrm.pipeline import OneRank
from nvt_loader import KJTLoader


def evaluate(
    pipeline: OneRank | TrainPipelineSparseDist,
    model: torch.nn.Module,
    loader: KJTLoader,
    batch_size: int,
    group: Group,
    after_step: Callable[[], None] = lambda: None,
) -> Metrics | None:
    """Metrics of ``model`` over all rows of ``loader`` on all ranks (collective).

    Args:
        pipeline: the training pipeline. It must be empty: batches that it had fetched for
            training would be evaluated instead of trained.
        model: the model in the pipeline; it is in training mode before and after.
        loader: of the split.
        batch_size: that the loader was made with.
        group: this rank.
        after_step: called after each batch.

    Returns:
        The metrics on rank 0, None on the others.

    Raises:
        SettingsError: a prediction is not finite (on rank 0).
    """
    if pipeline.batches:
        raise RuntimeError("evaluation would take batches that the pipeline fetched for training")
    model.eval()
    logits, labels = [], []
    batches = _batches(loader, batch_size, group)
    with torch.no_grad():
        while True:
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                break
            logits.append(output.logits)
            labels.append(output.labels.float())
            after_step()
    model.train()
    rows = torch.zeros(0, 2)
    if logits:
        rows = torch.stack([torch.cat(logits), torch.cat(labels)], dim=1)
    everything = gather_rows(group, rows.cpu().numpy())
    if everything is None:
        return None
    bad = np.count_nonzero(~np.isfinite(everything[:, 0]))
    if bad:
        raise SettingsError(
            f"{bad} of {len(everything)} predictions are not finite",
            "training diverged: lower --learning_rate; or the data hold values that are not finite",
        )
    return compute_metrics(everything[:, 0], everything[:, 1])


def _batches(loader: KJTLoader, batch_size: int, group: Group) -> Iterator[TrainBatch]:
    """A fresh iterator of batches, equally large on all ranks; their loss is a plain sum."""
    left = loader.num_rows
    for batch in loader:
        size = min(batch_size, -(-left // group.world_size))
        left -= size * group.world_size
        yield TrainBatch.of(batch, size, 1)


@torch.inference_mode()
def score(model: Scorer, loader: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and labels (float32 [N] each) of an unsharded model, in the order of the rows."""
    logits, labels = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
    for batch in loader:
        logits.append(model(batch.dense_features, batch.sparse_features).cpu().numpy())
        labels.append(batch.labels.float().cpu().numpy())
    return np.concatenate(logits), np.concatenate(labels)
