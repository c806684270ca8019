"""What a model must beat: always predicting the click rate, logistic regression, boosted trees.

A loss alone says nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pandas as pd
import pyarrow as pa

from nvt_torchrec.base.auroc import bin_numbers, column_auroc
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.metrics import ByLabel, compute_metrics, groups_of
from nvt_torchrec.models.piecewise import find_edges
from nvt_torchrec.nvt_loader.selection import Selection
from nvt_torchrec.training.baselines.regression import (
    BATCH,
    RowSample,
    Start,
    fit_regression,
    read_sample,
)
from nvt_torchrec.training.baselines.trees import Trees
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: The names of the baselines.
CLICK_RATE, REGRESSION, TREES = "click rate", "logistic regression", "boosted trees"
#: The values of a sample to fit to, which take seconds, and the batches to evaluate.
_VALUES, _EVALUATED = 2**23, 12


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
    fitted = read_sample(settings, config, "train", _batches_to_fit(config), training)
    clicks = {label: fitted.click_rate(label) for label in config.labels}
    offset = float(np.log(settings.undersampling_rate or 1.0))
    edges = find_edges(fitted.dense, config.dense_bins) if config.dense_bins else None
    regressions, trees = {}, {}
    for label, rate in clicks.items():
        if 0 < rate < 1:
            if settings.boosted_trees:
                with contextlib.suppress(ImportError, OSError):
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


def best_column(
    settings: TrainSettings, config: ModelConfig, split: str, label: str
) -> tuple[str, float]:
    """Return the column that has the largest AUROC alone, in a sample of a split, and the AUROC."""
    sample = read_sample(settings, config, split, _EVALUATED)
    labels = sample.labels[label]
    found = {}
    for name, column in zip(config.features, sample.columns, strict=True):
        rows = np.arange(len(labels)) if column.rows is None else column.rows
        with_ids, row = np.unique(rows, return_inverse=True)
        found[name] = column_auroc(pa.array(column.ids), labels[with_ids], row)
    for name, values in zip(config.dense, sample.dense.T, strict=True):
        found[name] = column_auroc(pa.array(bin_numbers(values)), labels)
    best = max(found, key=lambda name: found[name] or 0.0)
    return best, found[best] or 0.0


def measure_repeated_rows(
    settings: TrainSettings, config: ModelConfig, split: str
) -> tuple[float, float]:
    """Return which share of a split's rows has all features as a training row has them, at least.

    Lists are not compared. Both are samples: of a log that is larger than that of the training
    rows, only a part is found.

    Returns:
        The share, and that of the training rows that are equal to one before them.
    """
    trained, others = (
        _hash_rows(read_sample(settings, config, name, batches))
        for name, batches in (("train", _batches_to_fit(config)), (split, _EVALUATED))
    )
    distinct = np.unique(trained)
    return np.isin(others, distinct).mean(), 1 - len(distinct) / max(1, len(trained))


def _hash_rows(sample: RowSample) -> np.ndarray:
    """Return a hash of the dense columns and columns of one value of each row, uint64 [rows]."""
    columns = [*sample.dense.T, *(each.ids for each in sample.columns if each.rows is None)]
    return pd.util.hash_pandas_object(pd.DataFrame(dict(enumerate(columns))), index=False).values


def _batches_to_fit(config: ModelConfig) -> int:
    columns = len(config.dense) + len(config.features)
    return max(_EVALUATED, _VALUES // (BATCH * columns))
