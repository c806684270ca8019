"""The items that can be drawn: their keys, their first times, and the columns that they determine.

They are stored like a table (:mod:`formats.table_files`), with one row for each item.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.etl.tables.table_writer import (
    concatenate_values,
    find_column,
    save_array,
    take_values,
    to_arrays,
)
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.negatives import list_item_columns
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.rows import CategoryValues, RawRows
from nvt_torchrec.formats.table_files import KEYS, STARTS
from nvt_torchrec.workflows.stored_table import StoredTable

#: The name of the table in which they are stored.
CANDIDATES = "candidates"


def make_candidate_spec(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec of the stored items, with the columns that depend only on the item.

    Args:
        spec: The columns of the log.
    """
    assert spec.negatives is not None
    item = spec.negatives.item
    columns = select_item_columns(spec, CANDIDATES)
    categorical = [column for column in columns if isinstance(column, CategoricalColumn)]
    if not categorical:  # a spec must have one; this one does not belong to the table
        categorical = [CategoricalColumn("item", "string")]
    rule = TableRule(CANDIDATES, path="-", key=(item,), valid_from="-", log_time="-")
    return FeatureSpec(
        label=spec.label,
        dense=tuple(column for column in columns if isinstance(column, DenseColumn)),
        categorical=tuple(categorical),
        dense_transform=spec.dense_transform,
        tables=(rule,),
    )


def select_item_columns(
    spec: FeatureSpec, table: str, source: str = ""
) -> list[DenseColumn | CategoricalColumn]:
    """Return the columns that depend only on a row's item, as columns of a table.

    Args:
        spec: The columns of the log.
        table: The name of the table.
        source: The column from which they are read; "" for the log's item column.
    """
    assert spec.negatives is not None
    columns = []
    for column in list_item_columns(spec.negatives, spec.features):
        reading = dataclasses.replace(column.reading, sources=(source or spec.negatives.item,))
        columns.append(dataclasses.replace(column, reading=reading, table=table))
    return columns


@dataclasses.dataclass(frozen=True)
class ItemRows:
    """Rows of items; an item may have several rows.

    Attributes:
        keys: int64 [n], the hashes of the items.
        starts: int64 [n], the times of the rows; 0 if the spec has no times.
        columns: By name of a column, its values [n], and the mask of missing values, bool [n].
    """

    keys: np.ndarray
    starts: np.ndarray
    columns: Mapping[str, tuple[CategoryValues, np.ndarray]]

    @classmethod
    def from_rows(
        cls, rows: RawRows, spec: FeatureSpec, names: Iterable[str], keys: np.ndarray
    ) -> ItemRows:
        """Return the items of rows of the log or of a table.

        Args:
            rows: The rows.
            spec: The spec by which they were read.
            names: The columns of the items.
            keys: int64 [n], the hashes of the items.
        """
        starts = rows.negative_times
        if starts is None:
            starts = np.zeros(len(rows), np.int64)
        columns = {name: find_column(rows, spec, name) for name in names}
        return cls(keys, starts, columns)

    @classmethod
    def concatenate(cls, parts: list[ItemRows]) -> ItemRows:
        """Join parts, at least one."""
        columns = {}
        for name in parts[0].columns:
            values = concatenate_values([part.columns[name][0] for part in parts])
            columns[name] = values, np.concatenate([part.columns[name][1] for part in parts])
        keys = np.concatenate([part.keys for part in parts])
        return cls(keys, np.concatenate([part.starts for part in parts]), columns)

    def keep_oldest(self) -> ItemRows:
        """Return the oldest row of each item, in the order of the keys, without missing items."""
        order = np.lexsort((self.starts, self.keys))
        keys = self.keys[order]
        is_first = keys != 0
        is_first[1:] &= keys[1:] != keys[:-1]
        kept = order[is_first]
        columns = {}
        for name, (values, missing) in self.columns.items():
            columns[name] = take_values(values, kept), missing[kept]
        return ItemRows(self.keys[kept], self.starts[kept], columns)

    def write(self, directory: Path, spec: FeatureSpec) -> None:
        """Write the items to a directory, in the format of :meth:`read`."""
        directory.mkdir(parents=True)
        save_array(directory / KEYS, self.keys)
        save_array(directory / STARTS, self.starts)
        for column in spec.table_columns(CANDIDATES):
            values, missing = self.columns[column.name]
            if isinstance(values, pa.Array):
                values = values.cast(pa.large_string())
            for kind, array in to_arrays(column, values, missing).items():
                save_array(directory / f"{column.name}.{kind}.npy", array)

    @classmethod
    def read(cls, directory: Path, spec: FeatureSpec) -> ItemRows:
        """Read the items that :meth:`write` wrote. Raises :class:`BadInputError`."""
        table = StoredTable(directory, spec, CANDIDATES)
        assert table.starts is not None
        every = np.arange(len(table))
        columns = {c.name: table.take(c.name, every) for c in spec.table_columns(CANDIDATES)}
        return cls(table.keys, table.starts, columns)
