"""What a model must beat: always predicting the click rate, and logistic regression.

A loss alone says nothing.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.auroc import column_auroc
from nvt_torchrec.dlrm.metrics import ByLabel, compute_metrics, groups_of
from nvt_torchrec.dlrm.models.config import ModelConfig
from nvt_torchrec.dlrm.regression import BATCH, Regression, fit_regression, read_sample
from nvt_torchrec.dlrm.reporting.metrics_log import CLICK_RATE, REGRESSION
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from nvt_torchrec.nvt_loader.selection import Selection

#: The values of a sample to fit to, which take seconds, and the batches to evaluate.
_VALUES, _EVALUATED = 2**23, 12
#: A dense column is cut at these for the AUROC that it has alone.
_QUANTILES = np.linspace(0, 1, 33)


def compute_baselines(
    settings: TrainSettings, config: ModelConfig, training: Selection | None
) -> tuple[dict[str, Regression], dict[tuple[str, str], ByLabel]]:
    """Fit the baselines to training rows.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        training: The part of the training set that the run reads.

    Returns:
        The regression of each label, for the whole log where rows are undersampled, and the metrics
        by split and name. A label whose values are all the same has none.
    """
    columns = len(config.dense) + len(config.categorical)
    batches = max(_EVALUATED, _VALUES // (BATCH * columns))
    fitted = read_sample(settings, config, "train", batches, training)
    clicks = {label: fitted.click_rate(label) for label in config.labels}
    offset = float(np.log(settings.undersampling_rate or 1.0))
    regressions = {}
    for label, rate in clicks.items():
        if 0 < rate < 1:
            found = fit_regression(fitted, label)
            regressions[label] = dataclasses.replace(found, bias=found.bias + offset)
    metrics: dict[tuple[str, str], ByLabel] = {}
    for split in ("valid", "test") if regressions else ():
        sample = read_sample(settings, config, split, _EVALUATED)
        groups = None
        if settings.gauc_column:
            column = sample.columns[config.categorical.index(settings.gauc_column)]
            groups = groups_of(column.ids)
        metrics[split, CLICK_RATE], metrics[split, REGRESSION] = {}, {}
        for label, regression in regressions.items():
            rest = sample.labels[label], sample.weights, groups
            odds = clicks[label] / (1 - clicks[label])
            constant = np.full(len(sample.dense), np.log(odds) + offset)
            metrics[split, CLICK_RATE][label] = compute_metrics(constant, *rest)
            metrics[split, REGRESSION][label] = compute_metrics(regression.logits(sample), *rest)
    return regressions, metrics


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
