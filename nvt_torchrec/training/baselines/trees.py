"""Boosted trees, which a model is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.special import logit

from nvt_torchrec.training.baselines.regression import RowSample

#: The rows that trees are fitted to, at most; with 40 columns that takes some seconds.
_TREE_ROWS = 200_000
#: The ids of a column that trees of LightGBM, and of scikit-learn, tell apart.
_IDS, _SCIKIT_IDS = 4000, 254


class Trees:
    """Boosted trees with their library's defaults: LightGBM (Ke et al. 2017), or scikit-learn's.

    Ids are categories, the most frequent ones of a column; of a list the first id counts, of a
    history the newest one.

    Raises:
        ImportError: scikit-learn is not installed, by which LightGBM is called, too.
    """

    def __init__(self, sample: RowSample, label: str) -> None:
        from sklearn.ensemble import HistGradientBoostingClassifier

        lightgbm: Any = None
        with contextlib.suppress(ImportError, OSError):  # or OpenMP's library is missing
            import lightgbm

        self._known: list[np.ndarray] = []
        for ids in _first_ids(sample):
            values, counts = np.unique(ids, return_counts=True)
            order = np.argsort(-counts, kind="stable")[: _IDS if lightgbm else _SCIKIT_IDS]
            self._known.append(np.sort(values[order]))
        rows, dense = slice(_TREE_ROWS), sample.dense.shape[1]
        data = self._inputs(sample)[rows], sample.labels[label][rows]
        weights = None if sample.weights is None else sample.weights[rows]
        places: Any = list(range(dense, dense + len(self._known)))
        if lightgbm:
            fixed: Any = {"deterministic": True, "force_col_wise": True, "verbose": -1}
            model = lightgbm.LGBMClassifier(n_jobs=torch.get_num_threads(), **fixed)
            model.fit(*data, sample_weight=weights, categorical_feature=places)
        else:
            model = HistGradientBoostingClassifier(categorical_features=places, random_state=0)
            model.fit(*data, weights)
        self._model = model

    def logits(self, sample: RowSample) -> np.ndarray:
        """Return the logits of rows, float64 [n]."""
        return logit(self._model.predict_proba(self._inputs(sample))[:, 1].clip(1e-7, 1 - 1e-7))

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
