"""What a model must beat: always predicting the click rate, logistic regression, boosted trees.

A loss alone says nothing.
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

#: What a training starts from, and the metrics of the baselines by split and name.
Baselines: TypeAlias = tuple[Start, dict[tuple[str, str], ByLabel]]
#: Returns the logits of rows, float64 [n].
Predictor: TypeAlias = Callable[[RowSample], np.ndarray]
#: The names of the baselines.
CLICK_RATE = "click rate"
REGRESSION = "logistic regression"
TREES = "boosted trees"
#: The values of the sample that the regression is fitted to, which takes seconds.
_FITTED_VALUES = 2**23
#: The batches of valid and of test that are evaluated.
_EVALUATED_BATCHES = 12
#: The rows that trees are fitted to, at most; with 40 columns that takes some seconds.
_MAX_TREE_ROWS = 200_000
#: The largest number of trees.
_MAX_TREES = 1000
#: The trees without a gain on valid after which no more are added.
_TREES_WITHOUT_GAIN = 50
#: The ids of a column that trees tell apart.
_MAX_TREE_IDS = 4000


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
    batches = _count_fitted_batches(config)
    fitted = read_sample(settings, config, "train", batches, files)
    valid = read_sample(settings, config, "valid", _EVALUATED_BATCHES)
    # In a part of the rows an id occurs less often than in all, so its counts would mislead.
    is_whole = len(fitted) < batches * BATCH
    edges = None
    if config.dense_bins:
        edges = find_edges(fitted.dense, config.dense_bins)
    # Undersampling leaves out rows without a click. In the whole log the odds of a click are lower
    # by its rate, and logits by the logarithm.
    offset = float(np.log(settings.undersampling_rate or 1.0))
    models: dict[str, dict[str, Predictor]] = {}
    regressions = {}
    for label in config.labels:
        rate = fitted.click_rate(label)
        if not 0 < rate < 1:
            continue
        found = fit_regression(fitted, label, edges)
        found = choose_penalties(Objective(fitted, label, edges), found, valid, label, offset)
        if is_whole:
            found = add_count_weights(found, fitted, valid, label, config.feature_rows, offset)
        regressions[label] = found.shift(offset)
        models[label] = {
            CLICK_RATE: functools.partial(_predict_click_rate, rate, offset),
            REGRESSION: regressions[label].logits,
        }
        if settings.boosted_trees:
            # Without LightGBM there are no trees to compare with.
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
    """Return the same logit for all rows, that of a click rate; float64 [n]."""
    return np.full(len(sample), logit(rate) + offset)


def _evaluate_models(
    models: dict[str, dict[str, Predictor]],
    split: str,
    sample: RowSample,
    settings: TrainSettings,
    config: ModelConfig,
) -> dict[tuple[str, str], ByLabel]:
    """Return the metrics of the models of each label on rows of a split, by split and name."""
    groups = None
    if settings.gauc_column:
        column = sample.columns[config.categorical.index(settings.gauc_column)]
        groups = find_groups(column.ids)
    metrics: dict[tuple[str, str], ByLabel] = {}
    for label, models_of_label in models.items():
        for name, predict in models_of_label.items():
            found = compute_metrics(predict(sample), sample.labels[label], sample.weights, groups)
            metrics.setdefault((split, name), {})[label] = found
    return metrics


def _count_lookups(
    sample: RowSample, config: ModelConfig
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return ``Start.lookups`` of the rows of a sample."""
    # Columns of one vocabulary look up the same table.
    ids_by_table: dict[str, list[np.ndarray]] = {}
    for name, column in zip(config.categorical, sample.columns, strict=False):
        if column.rows is None:
            ids_by_table.setdefault(config.table_by_column[name], []).append(column.ids)
    found = {}
    for table, ids in ids_by_table.items():
        values, counts = np.unique(np.concatenate(ids), return_counts=True)
        found[table] = values, (counts / len(sample)).astype(np.float32)
    return found


def best_column(
    settings: TrainSettings, config: ModelConfig, split: str, label: str
) -> tuple[str, float]:
    """Return the column that has the largest AUROC alone, in a sample of a split, and the AUROC."""
    sample = read_sample(settings, config, split, _EVALUATED_BATCHES)
    labels = sample.labels[label]
    # An AUROC is None where all rows have the same label.
    areas: dict[str, float] = {}
    for name, column in zip(config.features, sample.columns, strict=True):
        rows = np.arange(len(labels)) if column.rows is None else column.rows
        # Rows of lists without an id have no value.
        with_ids, row = np.unique(rows, return_inverse=True)
        areas[name] = column_auroc(pa.array(column.ids), labels[with_ids], row) or 0.0
    for name, values in zip(config.dense, sample.dense.T, strict=True):
        areas[name] = column_auroc(pa.array(bin_numbers(values)), labels) or 0.0
    best = max(areas, key=areas.__getitem__)
    return best, areas[best]


def measure_repeated_rows(
    settings: TrainSettings, config: ModelConfig, split: str
) -> tuple[float, float]:
    """Return which share of a split's rows has all features as a training row has them, at least.

    Lists are not compared. Both are samples: of a log that is larger than that of the training
    rows, only a part is found.

    Returns:
        The share, and that of the training rows that are equal to one before them.
    """
    trained = _hash_rows(read_sample(settings, config, "train", _count_fitted_batches(config)))
    others = _hash_rows(read_sample(settings, config, split, _EVALUATED_BATCHES))
    distinct = np.unique(trained)
    return np.isin(others, distinct).mean(), 1 - len(distinct) / max(1, len(trained))


def _hash_rows(sample: RowSample) -> np.ndarray:
    """Return a hash of the dense columns and columns of one value of each row, uint64 [rows]."""
    columns = list(sample.dense.T)
    for column in sample.columns:
        if column.rows is None:
            columns.append(column.ids)
    return pd.util.hash_pandas_object(pd.DataFrame(dict(enumerate(columns))), index=False).values


def _count_fitted_batches(config: ModelConfig) -> int:
    columns = len(config.dense) + len(config.features)
    return max(_EVALUATED_BATCHES, _FITTED_VALUES // (BATCH * columns))


class Trees:
    """Boosted trees with the defaults of LightGBM (Ke et al. 2017), as many as valid wants.

    Ids are categories, the most frequent ones of a column; of a list the first id counts, of a
    history the newest one.

    Args:
        sample: Rows to fit to.
        valid: Rows whose log loss says how many trees are best; without any it is LightGBM's
            default, 100.
        label: The label, which both values of ``sample``'s rows have.
        offset: By how much logits are larger than those of ``sample``'s rows.

    Raises:
        ImportError: LightGBM is not installed.
        OSError: OpenMP's library is missing.
    """

    def __init__(
        self, sample: RowSample, valid: RowSample, label: str, offset: float = 0.0
    ) -> None:
        import lightgbm

        self._offset, self._base = offset, 0.0
        if np.any(sample.corrections):
            # LightGBM does not begin at the click rate if rows have logits to begin with.
            self._base = logit(sample.click_rate(label))
        self._known: list[np.ndarray] = []
        for ids in _first_ids(sample):
            values, counts = np.unique(ids, return_counts=True)
            order = np.argsort(-counts, kind="stable")[:_MAX_TREE_IDS]
            self._known.append(np.sort(values[order]))
        num_dense = sample.dense.shape[1]
        categorical = list(range(num_dense, num_dense + len(self._known)))
        train = lightgbm.Dataset(
            self._inputs(sample)[:_MAX_TREE_ROWS],
            sample.labels[label][:_MAX_TREE_ROWS],
            weight=None if sample.weights is None else sample.weights[:_MAX_TREE_ROWS],
            categorical_feature=categorical,
            init_score=self._begin(sample, _MAX_TREE_ROWS),
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
                self._inputs(valid),
                valid.labels[label],
                weight=valid.weights,
                init_score=self._begin(valid, len(valid)),
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
        return logit(found.clip(1e-7, 1 - 1e-7)) + self._offset + self._base + sample.corrections

    def _begin(self, sample: RowSample, max_rows: int) -> np.ndarray | None:
        """Return the logits that trees add to, float64 [rows]; None for those of the click rate."""
        if not self._base:
            return None
        return (self._base + sample.corrections + np.zeros(len(sample)))[:max_rows]

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
        # The last id that is written to a row stays: the first of a list, if it is written
        # backwards, and the last, newest one of a history.
        order = slice(None, None, -1 if column.shares is None else 1)
        ids[rows[order]] = column.ids[order]
        yield ids
