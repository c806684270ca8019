"""The files of tables in a saved workflow, which hold columns by key, such as users or items.

Layout of ``WORKFLOW/tables/NAME``. The workflow's ``metadata.json`` lists the files with their
digests; they are memory-mapped::

    keys.npy              int64 [rows], the hashes of the keys, ascending
    starts.npy            for a table with versions, int64 [rows]: the time from which each version
                          is known, in microseconds since 1970 UTC; ascending within a key
    COLUMN.missing.npy    uint8 [rows], 1 where the column is missing
    COLUMN.values.npy     for a dense column, float64 [rows]; for a categorical column, its distinct
                          values: int64, uint32 (raw type hex32), or the UTF-8 bytes of strings
    COLUMN.texts.npy      for strings, int64 [distinct + 1], the offset of each in these bytes
    COLUMN.codes.npy      for a categorical column, int32, the index of the value of each row or,
                          for lists, of each item; 0 where the column is missing
    COLUMN.lists.npy      for lists, int64 [rows + 1], the offset of each row's items
    VECTOR.missing.npy    uint8 [rows], 1 where the vector is missing
    VECTOR.codes.npy      int32 [rows], the number of each row's vector in ``WORKFLOW/vectors``,
                          see :mod:`formats.vectors`; 0 where it is missing

Values are raw: dense values are not transformed yet, and categories have no ids yet. So rows that
get them from a table are encoded like rows that hold them in their own columns. Distinct values are
stored once, so the ETL counts and encodes each once, however many rows of the log have it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES

#: The directory of all tables, in that of a workflow.
DIRECTORY = "tables"
KEYS = "keys.npy"
STARTS = "starts.npy"


def list_column_arrays(column: DenseColumn | CategoricalColumn) -> dict[str, np.dtype]:
    """Return the dtypes of a column's arrays, by the names of their files."""
    kinds: dict[str, type] = {"values": np.float64, "missing": np.uint8}
    if isinstance(column, CategoricalColumn):
        kind = RAW_TYPES[column.raw]
        kinds["codes"] = np.int32
        kinds["values"] = np.uint8 if kind.is_text else np.dtype(kind.dtype).type
        if kind.is_text:
            kinds["texts"] = np.int64
        if column.multi_hot:
            kinds["lists"] = np.int64
    return {f"{column.name}.{kind}.npy": np.dtype(dtype) for kind, dtype in kinds.items()}


def list_table_arrays(spec: FeatureSpec, table: str) -> dict[str, np.dtype]:
    """Return the dtypes of all arrays of a table, by the names of their files."""
    arrays: dict[str, np.dtype] = {KEYS: np.dtype(np.int64)}
    (rule,) = (rule for rule in spec.tables if rule.name == table)
    if rule.valid_from:
        arrays[STARTS] = np.dtype(np.int64)
    for column in spec.table_columns(table):
        arrays |= list_column_arrays(column)
    for vector in spec.table_vectors(table):
        arrays[f"{vector.name}.missing.npy"] = np.dtype(np.uint8)
        arrays[f"{vector.name}.codes.npy"] = np.dtype(np.int32)
    return arrays


def list_table_files(spec: FeatureSpec) -> list[str]:
    """Return the files of all tables of a workflow, relative to it."""
    files = []
    for rule in spec.joined_tables:
        for name in list_table_arrays(spec, rule.name):
            files.append(f"{DIRECTORY}/{rule.name}/{name}")
    return files


def link_table(spec: FeatureSpec, name: str, source: Path, target: Path) -> None:
    """Hard-link the files of a table into another directory, which must not have them.

    The files never change, so generations of a workflow share them.

    Raises:
        OSError: A file is missing or exists, or the file system has no hard links.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in list_table_arrays(spec, name):
        os.link(source / file, target / file)
