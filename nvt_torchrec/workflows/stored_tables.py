"""Join the columns of tables to rows, by the keys of the rows.

The ETL opens the tables to count and encode their columns as if they were columns of the log. With
a saved workflow, rows to score take the values known on the last day of the ETL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.artifact import check_digests, check_sizes
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import NO_TIME, RawRows, get_bit, get_word
from nvt_torchrec.formats.table_files import DIRECTORY, list_table_files
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.event_groups import find_cuts
from nvt_torchrec.workflows.stored_table import COPY_AGAIN, StoredTable


class StoredTables:
    """The open tables of a spec. Thread-safe.

    Args:
        directory: The directory that contains a directory for each table.
        spec: The columns.

    Attributes:
        by_name: The tables that columns are joined from, by name.

    Raises:
        BadInputError: A file is missing or damaged.
    """

    def __init__(self, directory: Path, spec: FeatureSpec) -> None:
        self.by_name = {
            rule.name: StoredTable(directory / rule.name, spec, rule.name)
            for rule in spec.joined_tables
        }

    @classmethod
    def open(cls, description: WorkflowDescription, *, verify: bool = False) -> StoredTables | None:
        """Open the tables of a saved workflow; None for a spec without tables.

        Args:
            description: The workflow's description, which lists the files.
            verify: Read the files, and compare their digests.

        Raises:
            BadInputError: A file is missing or damaged.
        """
        spec = description.spec
        if not spec.joined_tables:
            return None
        files = {name: description.files[name] for name in list_table_files(spec)}
        check_sizes(description.path, files, COPY_AGAIN)
        if verify:
            check_digests(description.path, files, COPY_AGAIN)
        return cls(description.path / DIRECTORY, spec)

    def look_up(
        self, rows: RawRows, spec: FeatureSpec, categories: Collection[str] = ()
    ) -> RawRows:
        """Find the rows of the tables by the rows' keys, and return the rows with their columns.

        Dense columns, numbers of vectors and the masks of missing values are filled. Categorical
        columns stay empty: :meth:`.StoredTable.count_values` and :meth:`.StoredTable.encode` work
        on ``table_rows`` and need no values.

        Args:
            rows: The rows, with the hashes of their keys.
            spec: The spec by which they were read; all of its tables must be open.
            categories: Categorical columns whose values are filled nevertheless.

        Raises:
            BadInputError: A file is damaged, or was written to since it was opened.
        """
        if rows.table_keys is None:
            return rows
        cuts = self._find_cuts(rows, spec)
        found = np.empty(rows.table_keys.shape, np.int64)
        rows_by_table: dict[str, np.ndarray] = {}
        for number, rule in enumerate(spec.joined_tables):
            table = self.by_name[rule.name]
            table.check()
            found[number] = table.find(rows.table_keys[number], cuts)
            rows_by_table[rule.name] = found[number]
        dense = rows.dense.copy()
        dense_missing = rows.dense_missing.copy()
        for j, column in enumerate(spec.dense):
            if column.table:
                table = self.by_name[column.table]
                table_rows = rows_by_table[column.table]
                table.write_dense(column.name, table_rows, dense[j])
                words = get_word(dense_missing, j)
                table.mark_missing(column.name, table_rows, words, get_bit(j))
        categorical = [*rows.categorical]
        categorical_missing = rows.categorical_missing.copy()
        for k, category in enumerate(spec.categorical):
            if category.table:
                table = self.by_name[category.table]
                table_rows = rows_by_table[category.table]
                if category.name in categories:
                    categorical[k], _ = table.take(category.name, table_rows)
                words = get_word(categorical_missing, k)
                table.mark_missing(category.name, table_rows, words, get_bit(k))
        vector_rows = None
        if spec.vectors:
            vector_rows = np.empty((len(spec.vectors), len(rows)), np.int32)
            for v, vector in enumerate(spec.vectors):
                table = self.by_name[vector.table]
                vector_rows[v] = table.take_vector_numbers(vector.name, rows_by_table[vector.table])
        return dataclasses.replace(
            rows,
            dense=dense,
            dense_missing=dense_missing,
            categorical=categorical,
            categorical_missing=categorical_missing,
            table_keys=None,
            table_rows=found,
            join_times=None,
            vector_rows=vector_rows,
        )

    def join(self, rows: RawRows, spec: FeatureSpec) -> RawRows:
        """Return rows with all columns of tables; see :meth:`look_up`."""
        if rows.table_keys is None:
            return rows
        joined = self.look_up(rows, spec, spec.categorical_names)
        return dataclasses.replace(joined, table_rows=None)

    def look_up_all(
        self, pieces: Iterable[RawRows], spec: FeatureSpec, categories: Collection[str] = ()
    ) -> Iterator[RawRows]:
        """Yield each piece as returned by :meth:`look_up`."""
        for rows in pieces:
            yield self.look_up(rows, spec, categories)

    def _find_cuts(self, rows: RawRows, spec: FeatureSpec) -> np.ndarray | None:
        """Return the time before which versions count for each row, int64 [n].

        None if the rows have no times.
        """
        if rows.join_times is None:
            return None
        cuts = find_cuts(spec, rows.join_times) if spec.events else rows.join_times
        # A row without a time takes the newest version.
        return np.where(rows.join_times == NO_TIME, np.iinfo(np.int64).max, cuts)
