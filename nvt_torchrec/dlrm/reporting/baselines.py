"""What a model must beat: always predicting the click rate, logistic regression, boosted trees.

A loss alone says nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from scipy.special import logit

from nvt_torchrec.base.auroc import column_auroc
from nvt_torchrec.dlrm.metrics import ByLabel, compute_metrics, groups_of
from nvt_torchrec.dlrm.models.config import ModelConfig
from nvt_torchrec.dlrm.models.piecewise import find_edges
from nvt_torchrec.dlrm.regression import BATCH, Sample, Start, fit_regression, read_sample
from nvt_torchrec.dlrm.reporting.metrics_log import CLICK_RATE, REGRESSION, TREES
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from nvt_torchrec.nvt_loader.selection import Selection

#: The values of a sample to fit to, which take seconds, and the batches to evaluate.
_VALUES, _EVALUATED = 2**23, 12
#: The rows that trees are fitted to, at most; with 40 columns that takes some seconds.
_TREE_ROWS = 200_000
#: The ids of a column that trees of LightGBM, and of scikit-learn, tell apart.
_IDS, _SCIKIT_IDS = 4000, 254
#: A dense column is cut at these for the AUROC that it has alone.
_QUANTILES = np.linspace(0, 1, 33)


def compute_baselines(
    settings: TrainSettings, config: ModelConfig, training: Selection | None
) -> tuple[Start, dict[tuple[str, str], ByLabel]]:
    """Fit the baselines to training rows.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        training: The part of the training set that the run reads.

    Returns:
        What the training starts from: the regression of each label, for the whole log where rows
        are undersampled. And the metrics by split and name. A label whose values are all the same
        has none.
    """
    columns = len(config.dense) + len(config.categorical)
    batches = max(_EVALUATED, _VALUES // (BATCH * columns))
    fitted = read_sample(settings, config, "train", batches, training)
    clicks = {label: fitted.click_rate(label) for label in config.labels}
    offset = float(np.log(settings.undersampling_rate or 1.0))
    edges = find_edges(fitted.dense, config.dense_bins) if config.dense_bins else None
    regressions, trees = {}, {}
    for label, rate in clicks.items():
        if 0 < rate < 1:
            if settings.boosted_trees:
                with contextlib.suppress(ImportError):
                    trees[label] = Trees(fitted, label)
            found = fit_regression(fitted, label, edges)
            regressions[label] = dataclasses.replace(found, bias=found.bias + offset)
    metrics: dict[tuple[str, str], ByLabel] = {}
    for split in ("valid", "test") if regressions else ():
        sample = read_sample(settings, config, split, _EVALUATED)
        groups = None
        if settings.gauc_column:
            column = sample.columns[config.categorical.index(settings.gauc_column)]
            groups = groups_of(column.ids)
        for label, regression in regressions.items():
            rest = sample.labels[label], sample.weights, groups
            odds = clicks[label] / (1 - clicks[label])
            logits = {CLICK_RATE: np.full(len(sample.dense), np.log(odds) + offset)}
            logits[REGRESSION] = regression.logits(sample)
            if label in trees:
                logits[TREES] = trees[label].logits(sample) + offset
            for name, values in logits.items():
                metrics.setdefault((split, name), {})[label] = compute_metrics(values, *rest)
    return Start(edges, regressions), metrics


class Trees:
    """Boosted trees with their library's defaults: LightGBM (Ke et al. 2017), or scikit-learn's.

    Ids are categories, the most frequent ones of a column; of a list the first id counts.

    Raises:
        ImportError: scikit-learn is not installed, by which LightGBM is called, too.
    """

    def __init__(self, sample: Sample, label: str) -> None:
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

    def logits(self, sample: Sample) -> np.ndarray:
        """Return the logits of rows, float64 [n]."""
        return logit(self._model.predict_proba(self._inputs(sample))[:, 1].clip(1e-7, 1 - 1e-7))

    def _inputs(self, sample: Sample) -> np.ndarray:
        places = [
            np.where(known[at := np.searchsorted(known[:-1], ids)] == ids, at, len(known))
            for known, ids in zip(self._known, _first_ids(sample), strict=True)
        ]
        return np.column_stack([sample.dense, *places]).astype(np.float32)


def _first_ids(sample: Sample) -> Iterator[np.ndarray]:
    """Yield for each categorical column the first id of each row, 0 without one."""
    for column in sample.columns:
        ids = np.zeros(len(sample.dense), np.int64)
        rows = np.arange(len(ids)) if column.rows is None else column.rows
        ids[rows[::-1]] = column.ids[::-1]
        yield ids


def best_column(
    settings: TrainSettings, config: ModelConfig, split: str, label: str
) -> tuple[str, float]:
    """Return the column that has the largest AUROC alone, in a sample of a split, and the AUROC."""
    sample = read_sample(settings, config, split, _EVALUATED)
    labels = sample.labels[label]
    found = {}
    for name, column in zip(config.categorical, sample.columns, strict=True):
        rows = np.arange(len(labels)) if column.rows is None else column.rows
        with_ids, row = np.unique(rows, return_inverse=True)
        found[name] = column_auroc(pa.array(column.ids), labels[with_ids], row)
    for name, values in zip(config.dense, sample.dense.T, strict=True):
        cuts = np.quantile(values, _QUANTILES)  # each is a value of its own, as of a filled column
        places = np.searchsorted(cuts, values) + np.searchsorted(cuts, values, "right")
        found[name] = column_auroc(pa.array(places), labels)
    best = max(found, key=lambda name: found[name] or 0.0)
    return best, found[best] or 0.0
