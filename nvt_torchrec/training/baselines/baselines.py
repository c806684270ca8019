"""The baselines of a model: always predicting the click rate, logistic regression, boosted trees.

A model's loss means little without them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
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
from nvt_torchrec.training.baselines.vector_statistics import measure_vectors
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: The start of a training, and the metrics of the baselines by split and name.
Baselines: TypeAlias = tuple[Start, dict[tuple[str, str], ByLabel]]
#: A function that returns the logits of rows, float64 [n].
Predictor: TypeAlias = Callable[[RowSample], np.ndarray]
#: The names of the baselines.
CLICK_RATE = "click rate"
REGRESSION = "logistic regression"
TREES = "boosted trees"
#: The number of values that the regression is fitted to. Fitting them takes seconds.
_FITTED_VALUES = 2**23
#: The number of batches of valid and of test to evaluate.
_EVALUATED_BATCHES = 12
#: The largest number of rows that trees are fitted to. With 40 columns that takes a few seconds.
_MAX_TREE_ROWS = 200_000
#: The largest number of trees.
_MAX_TREES = 1000
#: No more trees are added after this many without a gain on valid.
_TREES_WITHOUT_GAIN = 50
#: The largest number of a column's ids that trees distinguish.
_MAX_TREE_IDS = 4000


def compute_baselines(
    settings: TrainSettings, config: ModelConfig, files: tuple[Path, ...] | None
) -> Baselines:
    """Fit the baselines to training rows.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        files: The files of the training set that the run reads; None for all.

    Returns:
        The start of the training, with the regression of each label; if rows are undersampled, it
        predicts for the whole log. And the metrics by split and name. A label whose values are all
        the same has neither.
    """
    batches = _count_fitted_batches(config)
    fitted = read_sample(settings, config, "train", batches, files)
    valid = read_sample(settings, config, "valid", _EVALUATED_BATCHES)
    # A sample holds an id less often than the whole training set, so its counts would mislead.
    is_whole = len(fitted) < batches * BATCH
    edges = None
    if config.dense_bins:
        edges = find_edges(fitted.dense, config.dense_bins)
    # Undersampling drops rows without a click. In the whole log the odds of a click are lower by
    # the factor of the undersampling rate, and so the logits by its logarithm.
    offset = float(np.log(settings.undersampling_rate or 1.0))
    models: dict[str, dict[str, Predictor]] = {}
    regressions = {}
    for label in config.labels:
        rate = fitted.click_rate(label)
        if not 0 < rate < 1:
            continue
        regression = fit_regression(fitted, label, edges)
        objective = Objective(fitted, label, edges)
        regression = choose_penalties(objective, regression, valid, label, offset)
        if is_whole:
            regression = add_count_weights(
                regression, fitted, valid, label, config.feature_rows, offset
            )
        regressions[label] = regression.shift(offset)
        models[label] = {
            CLICK_RATE: functools.partial(_predict_click_rate, rate, offset),
            REGRESSION: regressions[label].logits,
        }
        if settings.boosted_trees:
            # Without LightGBM, or without the OpenMP library that it needs, trees are left out.
            with contextlib.suppress(ImportError, OSError):
                models[label][TREES] = Trees(fitted, valid, label, offset).logits
    metrics: dict[tuple[str, str], ByLabel] = {}
    if models:
        metrics |= _evaluate_models(models, "valid", valid, settings, config)
        test = read_sample(settings, config, "test", _EVALUATED_BATCHES)
        metrics |= _evaluate_models(models, "test", test, settings, config)
    statistics = measure_vectors(settings, config, files)
    return Start(edges, regressions, _count_lookups(fitted, config), statistics), metrics


def _predict_click_rate(rate: float, offset: float, sample: RowSample) -> np.ndarray:
    """Return the logit of a click rate for every row, float64 [n]."""
    return np.full(len(sample), logit(rate) + offset)


def _evaluate_models(
    models: dict[str, dict[str, Predictor]],
    split: str,
    sample: RowSample,
    settings: TrainSettings,
    config: ModelConfig,
) -> dict[tuple[str, str], ByLabel]:
    """Return the metrics of each label's models on a sample of a split, by split and name."""
    groups = None
    if settings.gauc_column:
        column = sample.columns[config.categorical.index(settings.gauc_column)]
        groups = find_groups(column.ids)
    metrics: dict[tuple[str, str], ByLabel] = {}
    for label, models_of_label in models.items():
        for name, predict in models_of_label.items():
            logits = predict(sample)
            by_label = metrics.setdefault((split, name), {})
            by_label[label] = compute_metrics(logits, sample.labels[label], sample.weights, groups)
    return metrics


def _count_lookups(
    sample: RowSample, config: ModelConfig
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return ``Start.lookups`` of a sample's rows."""
    # Columns that share a vocabulary look up the same table.
    ids_by_table: dict[str, list[np.ndarray]] = {}
    for name, column in zip(config.categorical, sample.columns, strict=False):
        if column.rows is None:
            ids_by_table.setdefault(config.table_by_column[name], []).append(column.ids)
    lookups = {}
    for table, ids in ids_by_table.items():
        values, counts = np.unique(np.concatenate(ids), return_counts=True)
        lookups[table] = values, (counts / len(sample)).astype(np.float32)
    return lookups


def find_best_column(
    settings: TrainSettings, config: ModelConfig, split: str, label: str
) -> tuple[str, float]:
    """Return the column that alone has the largest AUROC in a sample of a split, and its AUROC."""
    sample = read_sample(settings, config, split, _EVALUATED_BATCHES)
    labels = sample.labels[label]
    # A column's AUROC is None if all of its rows have the same label.
    aurocs: dict[str, float] = {}
    for name, column in zip(config.features, sample.columns, strict=True):
        rows = np.arange(len(labels)) if column.rows is None else column.rows
        # Rows with an empty list have no value.
        rows_with_ids, index = np.unique(rows, return_inverse=True)
        aurocs[name] = column_auroc(pa.array(column.ids), labels[rows_with_ids], index) or 0.0
    for name, values in zip(config.dense, sample.dense.T, strict=True):
        aurocs[name] = column_auroc(pa.array(bin_numbers(values)), labels) or 0.0
    best = max(aurocs, key=aurocs.__getitem__)
    return best, aurocs[best]


def measure_repeated_rows(
    settings: TrainSettings, config: ModelConfig, split: str
) -> tuple[float, float]:
    """Measure how many of a split's rows have the same features as a training row.

    Lists are not compared. Both sides are samples, so in a large log only some of the repeated rows
    are found.

    Returns:
        The share of repeated rows in the split, and the share of training rows that repeat an
        earlier training row.
    """
    trained = _hash_rows(read_sample(settings, config, "train", _count_fitted_batches(config)))
    others = _hash_rows(read_sample(settings, config, split, _EVALUATED_BATCHES))
    distinct = np.unique(trained)
    return np.isin(others, distinct).mean(), 1 - len(distinct) / max(1, len(trained))


def _hash_rows(sample: RowSample) -> np.ndarray:
    """Return a hash of each row's dense and single-valued columns, uint64 [rows]."""
    columns = list(sample.dense.T)
    for column in sample.columns:
        if column.rows is None:
            columns.append(column.ids)
    return pd.util.hash_pandas_object(pd.DataFrame(dict(enumerate(columns))), index=False).values


def _count_fitted_batches(config: ModelConfig) -> int:
    columns = len(config.dense) + len(config.features)
    return max(_EVALUATED_BATCHES, _FITTED_VALUES // (BATCH * columns))


class Trees:
    """Boosted trees with LightGBM's defaults (Ke et al. 2017); valid decides how many.

    The most frequent ids of a column are its categories. Of a list only the first id counts, of a
    history only the newest.

    Args:
        sample: The rows to fit to.
        valid: The rows on which the log loss decides the number of trees; if empty, it is
            LightGBM's default, 100.
        label: The label, which must have both values in ``sample``.
        offset: The difference to add to the logits that fit ``sample``'s rows.

    Raises:
        ImportError: LightGBM is not installed.
        OSError: OpenMP's library is missing.
    """

    def __init__(
        self, sample: RowSample, valid: RowSample, label: str, offset: float = 0.0
    ) -> None:
        import lightgbm

        self._offset = offset
        self._base = 0.0
        if np.any(sample.corrections):
            # With initial scores for the rows, LightGBM does not start from the click rate.
            self._base = logit(sample.click_rate(label))
        self._known: list[np.ndarray] = []
        for ids in _iterate_first_ids(sample):
            values, counts = np.unique(ids, return_counts=True)
            order = np.argsort(-counts, kind="stable")[:_MAX_TREE_IDS]
            self._known.append(np.sort(values[order]))
        num_dense = sample.dense.shape[1]
        categorical = list(range(num_dense, num_dense + len(self._known)))
        train = lightgbm.Dataset(
            self._make_inputs(sample)[:_MAX_TREE_ROWS],
            sample.labels[label][:_MAX_TREE_ROWS],
            weight=None if sample.weights is None else sample.weights[:_MAX_TREE_ROWS],
            categorical_feature=categorical,
            init_score=self._make_initial_logits(sample, _MAX_TREE_ROWS),
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
                self._make_inputs(valid),
                valid.labels[label],
                weight=valid.weights,
                init_score=self._make_initial_logits(valid, len(valid)),
            )
            stop = lightgbm.early_stopping(_TREES_WITHOUT_GAIN, verbose=False)
            self._model = lightgbm.train(
                parameters, train, _MAX_TREES, valid_sets=[evaluated], callbacks=[stop]
            )
        else:
            self._model = lightgbm.train(parameters, train)

    def logits(self, sample: RowSample) -> np.ndarray:
        """Return the logits of rows, float64 [n]."""
        probabilities = np.asarray(self._model.predict(self._make_inputs(sample)))
        logits = logit(probabilities.clip(1e-7, 1 - 1e-7))
        return logits + self._offset + self._base + sample.corrections

    def _make_initial_logits(self, sample: RowSample, max_rows: int) -> np.ndarray | None:
        """Return the logits that trees add to, float64 [rows]; None for LightGBM's default."""
        if not self._base:
            return None
        return (self._base + sample.corrections + np.zeros(len(sample)))[:max_rows]

    def _make_inputs(self, sample: RowSample) -> np.ndarray:
        """Return the dense values and categories, float32 [n, columns]."""
        columns = [sample.dense]
        for known, ids in zip(self._known, _iterate_first_ids(sample), strict=True):
            index = np.searchsorted(known[:-1], ids)
            columns.append(np.where(known[index] == ids, index, len(known)))
        return np.column_stack(columns).astype(np.float32)


def _iterate_first_ids(sample: RowSample) -> Iterator[np.ndarray]:
    """Yield, for each column, one id per row: a list's first, a history's newest; 0 if empty."""
    for column in sample.columns:
        ids = np.zeros(len(sample.dense), np.int64)
        rows = np.arange(len(ids)) if column.rows is None else column.rows
        # If several ids are assigned to a row, the last one stays. That is the newest event of a
        # history, and, in reverse order, the first id of a list.
        order = slice(None, None, -1 if column.shares is None else 1)
        ids[rows[order]] = column.ids[order]
        yield ids
