"""Add negatives to rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.etl.negatives.candidates import CANDIDATES, make_candidate_spec
from nvt_torchrec.etl.negatives.draws import draw_items
from nvt_torchrec.etl.negatives.negatives_record import COUNTS, PAIRS, read_record
from nvt_torchrec.etl.tables.table_writer import take_values
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.negatives import list_item_columns
from nvt_torchrec.formats.rows import (
    CategoryValues,
    RawRows,
    is_missing,
    set_missing,
)
from nvt_torchrec.workflows.event_groups import find_cuts
from nvt_torchrec.workflows.stored_table import StoredTable

#: Fields of :class:`RawRows` with a value for each row, which negatives copy from their row. Those
#: with the default None may be absent.
_ARRAYS = (
    "labels",
    "dense",
    "dense_missing",
    "categorical_missing",
    "line",
    *(field.name for field in dataclasses.fields(RawRows) if field.default is None),
)


class NegativeSampler:
    """Adds negatives to rows with label 1. Thread-safe.

    Args:
        directory: The directory that :func:`.prepare_negatives.prepare_negatives` wrote.
        spec: The columns of the log.

    Raises:
        BadInputError: A file is missing or damaged.
    """

    def __init__(self, directory: Path, spec: FeatureSpec) -> None:
        assert spec.negatives is not None
        self._rule = spec.negatives
        self._items = StoredTable(directory / CANDIDATES, make_candidate_spec(spec), CANDIDATES)
        try:
            self._pairs = MappedArray(directory / PAIRS, np.int64, 1).values
            counts = MappedArray(directory / COUNTS, np.int64, 1).values
            if len(counts) != len(self._items):
                raise ValueError(f"{COUNTS} has {len(counts)} values, not {len(self._items)}")
        except (OSError, ValueError) as error:
            remedy = "copy the directory again, or run the ETL again"
            raise BadInputError(f"{directory}: damaged: {error}", remedy) from error
        assert self._items.starts is not None
        # Ordered by first time, so that the items that exist at a time are a prefix.
        self._order = np.lexsort((self._items.keys, self._items.starts))
        self._keys = self._items.keys[self._order]
        self._starts = self._items.starts[self._order]
        self._weights = np.empty(0)
        self._corrections: np.ndarray | None = None
        if self._rule.popularity:
            log_weights = compute_log_weights(counts, self._rule.popularity)
            self._weights = np.cumsum((1.0 + counts[self._order]) ** self._rule.popularity)
            log_mean_weight = read_record(directory).log_mean_weight
            self._corrections = (log_mean_weight - log_weights).astype(np.float32)

    def add_all(self, pieces: Iterable[RawRows], spec: FeatureSpec) -> Iterator[RawRows]:
        """Yield pieces of rows with their negatives; see :meth:`add`."""
        for rows in pieces:
            yield self.add(rows, spec)

    def add(self, rows: RawRows, spec: FeatureSpec) -> RawRows:
        """Return rows, each followed by its negatives.

        A negative has label 0, another item, and the columns that depend only on the item. All
        other columns are copied from its row. It is no event.

        Args:
            rows: The rows, as they were read.
            spec: The spec by which they were read.

        Raises:
            BadInputError: A file is damaged.
        """
        assert rows.negative_keys is not None
        chosen = self._draw(rows, spec)
        drawn_per_row = np.count_nonzero(chosen >= 0, axis=1)
        index = np.repeat(np.arange(len(rows)), drawn_per_row + 1)
        # Of each row and its negatives, the first one is the row itself.
        drawn = np.ones(len(index), np.bool_)
        drawn[np.cumsum(drawn_per_row + 1) - drawn_per_row - 1] = False
        chosen_items = chosen[chosen >= 0]
        arrays: dict[str, Any] = {}
        for name in _ARRAYS:
            values = getattr(rows, name)
            arrays[name] = None if values is None else np.take(values, index, axis=-1)
        arrays["labels"][:, drawn] = 0
        self._replace_keys(arrays, spec, drawn, self._keys[chosen_items])
        if arrays["amounts"] is not None:
            arrays["amounts"][:, drawn] = np.nan
        stored = self._order[chosen_items]
        item_names = {column.name for column in list_item_columns(self._rule, spec.features)}
        for j, column in enumerate(spec.dense):
            if column.name in item_names:
                values, missing = self._items.take(column.name, stored)
                arrays["dense"][j, drawn] = values
                _replace_missing(arrays["dense_missing"], j, drawn, missing)
        # The values of items are appended to those of rows, so that one take gets both.
        index_or_item = index.copy()
        index_or_item[drawn] = len(rows) + np.arange(len(chosen_items))
        categorical: list[CategoryValues] = []
        for k, category in enumerate(spec.categorical):
            values = rows.categorical[k]
            if category.name in item_names:
                items, missing = self._items.take(category.name, stored)
                _replace_missing(arrays["categorical_missing"], k, drawn, missing)
                categorical.append(take_values(_append(values, items), index_or_item))
            else:
                categorical.append(take_values(values, index))
        if self._corrections is not None:
            own_corrections = self._look_up_corrections(rows.negative_keys[0])
            arrays["log_q_correction"] = own_corrections[index]
            arrays["log_q_correction"][drawn] = self._corrections[stored]
        arrays |= {"drawn": drawn, "negative_keys": None, "negative_times": None}
        return dataclasses.replace(rows, categorical=categorical, **arrays)

    def _look_up_corrections(self, keys: np.ndarray) -> np.ndarray:
        """Return the log-Q correction of each item, float32 [n].

        It is 0 for an item that is never drawn: a missing one, or one that the table lacks.
        """
        assert self._corrections is not None
        if not len(self._corrections):
            return np.zeros(len(keys), np.float32)
        known = self._items.keys  # ascending
        index = np.searchsorted(known, keys).clip(max=len(known) - 1)
        return np.where(known[index] == keys, self._corrections[index], np.float32(0))

    def _draw(self, rows: RawRows, spec: FeatureSpec) -> np.ndarray:
        """Draw items for each row: indices into ``_keys``, int64 [n, draws]; -1 for none."""
        assert rows.negative_keys is not None
        items, users = rows.negative_keys
        times = rows.negative_times
        if times is None:
            times = np.zeros(len(rows), np.int64)
            limits = np.full(len(rows), len(self._keys))
        else:
            cuts = find_cuts(spec, times) if spec.events else times
            limits = np.searchsorted(self._starts, cuts)
        limits[(rows.labels[0] != 1) | (items == 0)] = 0
        chosen = np.empty((len(rows), self._rule.per_positive), np.int64)
        draw_items(
            np.ascontiguousarray(users),
            np.ascontiguousarray(items),
            np.ascontiguousarray(times),
            limits.astype(np.int64),
            np.uint64(self._rule.seed),
            self._pairs,
            self._keys,
            self._weights,
            chosen,
        )
        return chosen

    def _replace_keys(
        self, arrays: dict[str, Any], spec: FeatureSpec, drawn: np.ndarray, keys: np.ndarray
    ) -> None:
        """Replace the hashes of keys that contain the item in the drawn rows.

        Args:
            arrays: The fields of the rows, changed in place.
            spec: The spec by which the rows were read.
            drawn: bool [n], the drawn rows.
            keys: int64 [drawn], the hashes of their items.
        """
        item = self._rule.item
        if arrays["table_keys"] is not None:
            for j, table in enumerate(spec.joined_tables):
                if table.key == (item,):
                    arrays["table_keys"][j, drawn] = keys
        if arrays["groups"] is not None:
            for j, key in enumerate(spec.row_keys):
                if key.columns == (item,):
                    arrays["groups"][j, drawn] = keys
                elif item in key.columns:
                    # A pair for a count of distinct values, which only events need.
                    arrays["groups"][j, drawn] = 0


def compute_log_weights(counts: np.ndarray, popularity: float) -> np.ndarray:
    """Return the logarithms of the items' weights, (1 + count) ** popularity, float64 [items].

    Args:
        counts: int64 [items], the number of training rows with label 1 of each item.
        popularity: The exponent.
    """
    return popularity * np.log1p(counts)


def _replace_missing(mask: np.ndarray, column: int, where: np.ndarray, missing: np.ndarray) -> None:
    """Replace a column's bits in the mask of missing values.

    Args:
        mask: The mask, changed in place.
        column: The index of the column.
        where: bool [n], the rows whose bits are replaced.
        missing: bool, for each of these rows whether the column is missing.
    """
    absent = is_missing(mask, column)
    absent[where] = missing
    set_missing(mask, column, absent)


def _append(values: CategoryValues, others: CategoryValues) -> CategoryValues:
    """Append the values of items to those of rows; both have one type, and are no lists."""
    if isinstance(values, pa.Array) and isinstance(others, pa.Array):
        return pa.concat_arrays([values, others.cast(values.type)])
    assert isinstance(values, np.ndarray)
    assert isinstance(others, np.ndarray)
    return np.concatenate([values, others])
