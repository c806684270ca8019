"""Boosted trees, which a model is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.special import logit

from nvt_torchrec.training.baselines.regression import RowSample

#: The rows that trees are fitted to, at most; with 40 columns that takes some seconds.
_TREE_ROWS = 200_000
#: The ids of a column that trees tell apart.
_IDS = 4000


class Trees:
    """Boosted trees with the defaults of LightGBM (Ke et al. 2017).

    Ids are categories, the most frequent ones of a column; of a list the first id counts, of a
    history the newest one.

    Raises:
        ImportError: LightGBM is not installed.
        OSError: OpenMP's library is missing.
    """

    def __init__(self, sample: RowSample, label: str) -> None:
        import lightgbm

        self._known: list[np.ndarray] = []
        for ids in _first_ids(sample):
            values, counts = np.unique(ids, return_counts=True)
            order = np.argsort(-counts, kind="stable")[:_IDS]
            self._known.append(np.sort(values[order]))
        rows, dense = slice(_TREE_ROWS), sample.dense.shape[1]
        data = self._inputs(sample)[rows], sample.labels[label][rows]
        weights = None if sample.weights is None else sample.weights[rows]
        places = list(range(dense, dense + len(self._known)))
        fitted = lightgbm.Dataset(*data, weight=weights, categorical_feature=places)
        fixed: dict[str, Any] = {"deterministic": True, "force_col_wise": True, "verbose": -1}
        fixed |= {"objective": "binary", "num_threads": torch.get_num_threads()}
        self._model = lightgbm.train(fixed, fitted)

    def logits(self, sample: RowSample) -> np.ndarray:
        """Return the logits of rows, float64 [n]."""
        found = np.asarray(self._model.predict(self._inputs(sample)))
        return logit(found.clip(1e-7, 1 - 1e-7))

    def _inputs(self, sample: RowSample) -> np.ndarray:
        places = [
            np.where(known[at := np.searchsorted(known[:-1], ids)] == ids, at, len(known))
            for known, ids in zip(self._known, _first_ids(sample), strict=True)
        ]
        return np.column_stack([sample.dense, *places]).astype(np.float32)


def _first_ids(sample: RowSample) -> Iterator[np.ndarray]:
    """Yield for each column the first id of each row, of a history the last; 0 without one."""
    for column in sample.columns:
        ids = np.zeros(len(sample.dense), np.int64)
        rows = np.arange(len(ids)) if column.rows is None else column.rows
        at = slice(None, None, -1 if column.shares is None else 1)
        ids[rows[at]] = column.ids[at]  # the last one that is written stays
        yield ids
