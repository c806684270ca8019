"""Rows of a split in memory, for the baselines."""

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

#: Rows are read in batches of this size.
BATCH = 8192
#: At most this many events of a history are read.
_MAX_EVENTS = 50


@dataclasses.dataclass(frozen=True)
class Column:
    """The ids of some rows: of a categorical column, a history, or the bins of a dense column.

    Of a dense column, the ids are the numbers of the two edges around each value.

    Attributes:
        ids: The ids of all rows, int64.
        rows: The row of each id, int64; None if each row has exactly one.
        shares: What part of an id's weight counts, float64: of an event one over the number of
            events, of an edge how near it is. None if all of it counts.
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
        """Whether it is a categorical column, not a history or bins."""
        return self.shares is None

    def sum_by_row(self, weights: np.ndarray, num_rows: int) -> np.ndarray:
        """Return the sum of the ids' ``weights`` [len(ids)] of each row, float64 [num_rows]."""
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
        columns: The categorical columns, then the histories'.
        labels: The values of each label that is trained, by its name, float32 [n].
        weights: The weights of the rows, float32 [n]; None if they have none.
        corrections: What is added to the logits of rows, float64 [n]: the log-Q correction
            (docs/negatives.md), if the run applies it and rows have one; else 0.
    """

    dense: np.ndarray
    columns: list[Column]
    labels: dict[str, np.ndarray]
    weights: np.ndarray | None
    corrections: np.ndarray | float = 0.0

    def __len__(self) -> int:
        return len(self.dense)

    def bins(self, edges: np.ndarray | None) -> list[Column]:
        """Return the columns of the dense values' edges; none without edges."""
        if edges is None:
            return []
        return [Column.from_bins(*pair) for pair in zip(self.dense.T, edges, strict=True)]

    def click_rate(self, label: str) -> float:
        """Return the (weighted) share of the rows with label 1; 0 without rows."""
        labels = self.labels[label]
        return float(np.average(labels, weights=self.weights)) if len(labels) else 0.0

    def relative_weights(self) -> np.ndarray:
        """Return the weights of the rows divided by their mean, float64 [n]."""
        if self.weights is None:
            return np.ones(len(self))
        return self.weights.astype(np.float64) / self.weights.mean()


def make_group_alone() -> Group:
    """Return this rank as the only one, to read rows on the CPU."""
    return Group(0, 1, 1, torch.device("cpu"), dist.GroupMember.WORLD)  # type: ignore[arg-type]


def read_sample(
    settings: TrainSettings,
    config: ModelConfig,
    split: str,
    batches: int,
    files: tuple[Path, ...] | None = None,
) -> RowSample:
    """Read at most so many batches of rows of a split, drawn at random, on this rank alone.

    The vectors of the data are left out: a regression or trees over their values would take minutes
    and gigabytes.
    """
    alone = make_group_alone()
    max_events = min(config.max_events, _MAX_EVENTS)
    changes: dict[str, Any] = {"max_events": max_events, "sequences": ()}
    config = dataclasses.replace(config, **changes, dense_vectors=(), own=None)
    num_columns = len(config.features)
    # The first of each is empty, so that a split without rows has the right shapes, too.
    dense = [np.zeros((0, len(config.dense)), np.float32)]
    labels = [np.zeros((0, len(config.labels)))]
    weights = []
    corrections = []
    # For each column: its ids, the row of each, and the number of ids of each row.
    ids: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(num_columns)]
    rows: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(num_columns)]
    lengths: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(num_columns)]
    num_rows = 0
    for batch in make_sample(settings, config, split, alone, batches, BATCH, files):
        features, size = batch.sparse_features, len(batch.labels)
        row_numbers = np.arange(num_rows, num_rows + size)
        batch_lengths = features.lengths().view(num_columns, size).long().numpy()
        ends = batch_lengths.sum(1).cumsum()[:-1]
        for j, values in enumerate(np.split(features.values().numpy(), ends)):
            ids[j].append(values)
            rows[j].append(np.repeat(row_numbers, batch_lengths[j]))
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
    """Return a column of the arrays of its batches: ids, the row of each, and rows' ids."""
    all_ids, all_rows, all_lengths = map(np.concatenate, (ids, rows, lengths))
    if is_history:
        return Column(all_ids, all_rows, 1 / all_lengths[all_rows])
    if (all_lengths == 1).all():
        return Column(all_ids, None)
    return Column(all_ids, all_rows)
