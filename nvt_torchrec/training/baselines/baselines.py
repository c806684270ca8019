"""What a model must beat: always predicting the click rate, logistic regression, boosted trees.

A loss alone says nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from scipy.special import logit

from nvt_torchrec.base.auroc import bin_numbers, column_auroc
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.metrics import ByLabel, compute_metrics, find_groups
from nvt_torchrec.models.piecewise import find_edges
from nvt_torchrec.training.baselines.id_counts import add_count_weights
from nvt_torchrec.training.baselines.penalties import choose_penalties
from nvt_torchrec.training.baselines.regression import Objective, Start, fit_regression
from nvt_torchrec.training.baselines.row_sample import BATCH, RowSample, read_sample
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: What a training starts from, and the metrics of the baselines by split and name.
Baselines: TypeAlias = tuple[Start, dict[tuple[str, str], ByLabel]]
#: The names of the baselines.
CLICK_RATE, REGRESSION, TREES = "click rate", "logistic regression", "boosted trees"
#: The values of a sample to fit to, which take seconds, and the batches to evaluate.
_VALUES, _EVALUATED = 2**23, 12
#: The rows that trees are fitted to, at most; with 40 columns that takes some seconds.
_TREE_ROWS = 200_000
#: At most so many trees, and the number of trees without a gain on valid after which they end.
_MAX_TREES, _TREES_WITHOUT_GAIN = 1000, 50
#: The ids of a column that trees tell apart.
_IDS = 4000


def compute_baselines(
    settings: TrainSettings, config: ModelConfig, files: tuple[Path, ...] | None
) -> Baselines:
    """Fit the baselines to training rows.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        files: Those of the training set that the run reads; None for all.

    Returns:
        What the training starts from: the regression of each label, for the whole log where rows
        are undersampled. And the metrics by split and name. A label whose values are all the same
        has none.
    """
    batches = _batches_to_fit(config)
    fitted = read_sample(settings, config, "train", batches, files)
    # In a part of the rows, an id would occur less often than in training.
    is_whole = len(fitted) < batches * BATCH
    clicks = {label: fitted.click_rate(label) for label in config.labels}
    offset = float(np.log(settings.undersampling_rate or 1.0))
    edges = find_edges(fitted.dense, config.dense_bins) if config.dense_bins else None
    valid = read_sample(settings, config, "valid", _EVALUATED)
    regressions, trees = {}, {}
    for label, rate in clicks.items():
        if 0 < rate < 1:
            if settings.boosted_trees:
                with contextlib.suppress(ImportError, OSError):
                    trees[label] = Trees(fitted, valid, label)
            found = fit_regression(fitted, label, edges)
            found = choose_penalties(Objective(fitted, label, edges), found, valid, label, offset)
            if is_whole:
                rest = valid, label, config.feature_rows, offset
                found = add_count_weights(found, fitted, *rest)
            regressions[label] = found.shift(offset)
    metrics: dict[tuple[str, str], ByLabel] = {}
    for split in ("valid", "test") if regressions else ():
        sample = valid
        if split == "test":
            sample = read_sample(settings, config, split, _EVALUATED)
        groups = None
        if settings.gauc_column:
            column = sample.columns[config.categorical.index(settings.gauc_column)]
            groups = find_groups(column.ids)
        for label, regression in regressions.items():
            rest = sample.labels[label], sample.weights, groups
            odds = clicks[label] / (1 - clicks[label])
            logits = {CLICK_RATE: np.full(len(sample.dense), np.log(odds) + offset)}
            logits[REGRESSION] = regression.logits(sample)
            if label in trees:
                logits[TREES] = trees[label].logits(sample) + offset
            for name, values in logits.items():
                metrics.setdefault((split, name), {})[label] = compute_metrics(values, *rest)
    return Start(edges, regressions, _count_lookups(fitted, config)), metrics


def _count_lookups(
    sample: RowSample, config: ModelConfig
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return ``Start.lookups`` of the rows of a sample."""
    ids_of: dict[str, list[np.ndarray]] = {}
    for name, column in zip(config.categorical, sample.columns, strict=False):
        if column.rows is None:
            ids_of.setdefault(config.table_of[name], []).append(column.ids)
    found = {}
    for table, ids in ids_of.items():
        values, counts = np.unique(np.concatenate(ids), return_counts=True)
        found[table] = values, (counts / len(sample)).astype(np.float32)
    return found


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


class Trees:
    """Boosted trees with the defaults of LightGBM (Ke et al. 2017), as many as valid wants.

    Ids are categories, the most frequent ones of a column; of a list the first id counts, of a
    history the newest one.

    Args:
        sample: Rows to fit to.
        valid: Rows whose log loss says how many trees are best; without any it is LightGBM's
            default, 100.
        label: The label.

    Raises:
        ImportError: LightGBM is not installed.
        OSError: OpenMP's library is missing.
    """

    def __init__(self, sample: RowSample, valid: RowSample, label: str) -> None:
        import lightgbm

        self._known: list[np.ndarray] = []
        for ids in _first_ids(sample):
            values, counts = np.unique(ids, return_counts=True)
            order = np.argsort(-counts, kind="stable")[:_IDS]
            self._known.append(np.sort(values[order]))
        num_dense = sample.dense.shape[1]
        categorical = list(range(num_dense, num_dense + len(self._known)))
        train = lightgbm.Dataset(
            self._inputs(sample)[:_TREE_ROWS],
            sample.labels[label][:_TREE_ROWS],
            weight=None if sample.weights is None else sample.weights[:_TREE_ROWS],
            categorical_feature=categorical,
        )
        parameters: dict[str, Any] = {
            "objective": "binary",
            "deterministic": True,
            "force_col_wise": True,
            "num_threads": torch.get_num_threads(),
            "verbose": -1,
        }
        if len(valid):
            evaluated = train.create_valid(
                self._inputs(valid), valid.labels[label], weight=valid.weights
            )
            stop = lightgbm.early_stopping(_TREES_WITHOUT_GAIN, verbose=False)
            self._model = lightgbm.train(
                parameters, train, _MAX_TREES, valid_sets=[evaluated], callbacks=[stop]
            )
        else:
            self._model = lightgbm.train(parameters, train)

    def logits(self, sample: RowSample) -> np.ndarray:
        """Return the logits of rows, float64 [n]."""
        found = np.asarray(self._model.predict(self._inputs(sample)))
        return logit(found.clip(1e-7, 1 - 1e-7))

    def _inputs(self, sample: RowSample) -> np.ndarray:
        columns = [sample.dense]
        for known, ids in zip(self._known, _first_ids(sample), strict=True):
            index = np.searchsorted(known[:-1], ids)
            columns.append(np.where(known[index] == ids, index, len(known)))
        return np.column_stack(columns).astype(np.float32)


def _first_ids(sample: RowSample) -> Iterator[np.ndarray]:
    """Yield for each column the first id of each row, of a history the last; 0 without one."""
    for column in sample.columns:
        ids = np.zeros(len(sample.dense), np.int64)
        rows = np.arange(len(ids)) if column.rows is None else column.rows
        at = slice(None, None, -1 if column.shares is None else 1)
        ids[rows[at]] = column.ids[at]  # the last one that is written stays
        yield ids
