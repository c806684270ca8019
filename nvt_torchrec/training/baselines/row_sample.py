"""Read a sample of a split's rows into memory, for the baselines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.piecewise import interpolate
from nvt_torchrec.training.data.loaders import make_sample
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: The batch size for reading rows.
BATCH = 8192
#: The largest number of events of a history to read.
_MAX_EVENTS = 50


@dataclasses.dataclass(frozen=True)
class Column:
    """The ids of rows in a categorical column, a history, or the bins of a dense column.

    The ids of a dense column are the indices of the two edges around each value.

    Attributes:
        ids: The ids of all rows, int64.
        rows: The row of each id, int64; None if each row has exactly one id.
        shares: The share of an id's weight that counts, float64: one over the row's number of
            events in a history, and the closeness to the value for an edge. None if all shares
            are 1.
    """

    ids: np.ndarray
    rows: np.ndarray | None
    shares: np.ndarray | None = None

    @classmethod
    def from_bins(cls, values: np.ndarray, edges: np.ndarray) -> Column:
        """Return the two edges around each value, and their shares."""
        below, share = interpolate(values, edges)
        rows = np.arange(len(values))
        return cls(
            ids=np.concatenate([below, below + 1]),
            rows=np.concatenate([rows, rows]),
            shares=np.concatenate([1 - share, share]),
        )

    @property
    def is_categorical(self) -> bool:
        """Whether this is a categorical column, and not a history or bins."""
        return self.shares is None

    def sum_by_row(self, weights: np.ndarray, num_rows: int) -> np.ndarray:
        """Sum the ``weights`` [len(ids)] of the ids in each row, float64 [num_rows]."""
        if self.rows is None:
            return weights
        if self.shares is not None:
            weights = weights * self.shares
        return np.bincount(self.rows, weights, num_rows)


@dataclasses.dataclass(frozen=True)
class RowSample:
    """Rows of a split.

    Attributes:
        dense: The dense values, float32 [n, dense columns].
        columns: The categorical columns, then those of the histories.
        labels: The values of each trained label, float32 [n], by name.
        weights: The weights of the rows, float32 [n]; None if rows have no weights.
        corrections: Terms to add to the logits, float64 [n]: the log-Q correction
            (docs/negatives.md), if the run applies it and the data have one; otherwise 0.
    """

    dense: np.ndarray
    columns: list[Column]
    labels: dict[str, np.ndarray]
    weights: np.ndarray | None
    corrections: np.ndarray | float = 0.0

    def __len__(self) -> int:
        return len(self.dense)

    def list_bins(self, edges: np.ndarray | None) -> list[Column]:
        """Return a column of bins for each dense column; empty without edges."""
        if edges is None:
            return []
        columns = []
        for values, column_edges in zip(self.dense.T, edges, strict=True):
            columns.append(Column.from_bins(values, column_edges))
        return columns

    def click_rate(self, label: str) -> float:
        """Return the (weighted) share of the rows with label 1; 0 without rows."""
        labels = self.labels[label]
        return float(np.average(labels, weights=self.weights)) if len(labels) else 0.0

    def relative_weights(self) -> np.ndarray:
        """Return the weights of the rows divided by their mean, float64 [n]."""
        if self.weights is None:
            return np.ones(len(self))
        return self.weights.astype(np.float64) / self.weights.mean()


def make_single_group() -> Group:
    """Return a group with this rank alone, to read rows on the CPU."""
    return Group(0, 1, 1, torch.device("cpu"), dist.GroupMember.WORLD)  # type: ignore[arg-type]


def read_sample(
    settings: TrainSettings,
    config: ModelConfig,
    split: str,
    batches: int,
    files: tuple[Path, ...] | None = None,
) -> RowSample:
    """Read a sample of a split on this rank alone; training rows are drawn at random.

    The vectors of the data are left out: a regression or trees over their values would take minutes
    and gigabytes.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        split: The split.
        batches: The largest number of batches of ``BATCH`` rows.
        files: The files to read; None for the whole split.
    """
    group = make_single_group()
    max_events = min(config.max_events, _MAX_EVENTS)
    changes: dict[str, Any] = {"max_events": max_events, "sequences": ()}
    config = dataclasses.replace(config, **changes, dense_vectors=(), own=None)
    num_columns = len(config.features)
    # Each list starts with an empty array, so that a split without rows has the right shapes, too.
    dense = [np.zeros((0, len(config.dense)), np.float32)]
    labels = [np.zeros((0, len(config.labels)))]
    weights = []
    corrections = []
    # For each column: its ids, the row of each, and the number of ids of each row.
    ids: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(num_columns)]
    rows: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(num_columns)]
    lengths: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(num_columns)]
    num_rows = 0
    for batch in make_sample(settings, config, split, group, batches, BATCH, files):
        features = batch.sparse_features
        size = len(batch.labels)
        row_indices = np.arange(num_rows, num_rows + size)
        batch_lengths = features.lengths().view(num_columns, size).long().numpy()
        ends = batch_lengths.sum(1).cumsum()[:-1]
        for j, values in enumerate(np.split(features.values().numpy(), ends)):
            ids[j].append(values)
            rows[j].append(np.repeat(row_indices, batch_lengths[j]))
            lengths[j].append(batch_lengths[j])
        num_rows += size
        dense.append(batch.dense_features.numpy())
        labels.append(batch.labels.numpy())
        if batch.weights is not None:
            weights.append(batch.weights.numpy())
        if settings.log_q_correction and batch.log_q_correction is not None:
            corrections.append(batch.log_q_correction.numpy())
    columns = []
    for j in range(num_columns):
        is_history = j >= len(config.categorical)
        columns.append(_make_column(ids[j], rows[j], lengths[j], is_history=is_history))
    row_weights = np.concatenate(weights) if weights else None
    labels_by_name = dict(zip(config.labels, np.concatenate(labels).T.copy(), strict=True))
    sample = RowSample(np.concatenate(dense), columns, labels_by_name, row_weights)
    if corrections:
        all_corrections = np.concatenate(corrections, dtype=np.float64)
        sample = dataclasses.replace(sample, corrections=all_corrections)
    return sample


def _make_column(
    ids: list[np.ndarray],
    rows: list[np.ndarray],
    lengths: list[np.ndarray],
    *,
    is_history: bool,
) -> Column:
    """Make a column from the arrays of its batches.

    Args:
        ids: The ids.
        rows: The row of each id.
        lengths: The number of ids of each row.
        is_history: Whether it is a history, in which the mean of the events counts.
    """
    all_ids = np.concatenate(ids)
    all_rows = np.concatenate(rows)
    all_lengths = np.concatenate(lengths)
    if is_history:
        return Column(all_ids, all_rows, 1 / all_lengths[all_rows])
    if (all_lengths == 1).all():
        return Column(all_ids, None)
    return Column(all_ids, all_rows)
