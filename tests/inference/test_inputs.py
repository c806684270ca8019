"""Rows of other libraries: Arrow streams, and what is refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.inference.predictor import Predictor
from tests.inference.bundles import ROWS


@pytest.fixture(scope="module")
def predictor(small_bundle: Path) -> Predictor:
    return Predictor.load(small_bundle)


class Stream:
    """What DuckDB's relations, Polars' frames and others have in common."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.columns = table.column_names

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)

    def __getitem__(self, name: str) -> object:
        raise AssertionError(f"a relation's {name} is another relation")


def test_arrow_streams(predictor: Predictor) -> None:
    table = pa.Table.from_pylist(ROWS)
    expected = predictor.predict(ROWS)
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=7))
    for rows in (Stream(table), reader):
        np.testing.assert_array_equal(predictor.predict(rows), expected)


class LazyFrame:
    """Polars' has the columns of a frame, and no values."""

    columns = ("int_0", "int_1", "cat_0", "cat_1")

    def __getitem__(self, name: str) -> object:
        raise TypeError(name)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (LazyFrame(), r"LazyFrame: a query that has not run\n  -> pass frame.collect\(\)"),
        (
            pd.DataFrame([[1, 2, "a", 3, "b"]], columns=[*ROWS[0], "cat_0"]),
            r"there are 2 columns cat_0\n  -> rename or drop",
        ),
        (
            pa.table([pa.array([1])] * 5, ["int_0", "int_1", "cat_0", "cat_1", "int_1"]),
            r"there are 2 columns int_1\n  -> rename or drop",
        ),
    ],
)  # fmt: skip
def test_rows_that_are_refused(predictor: Predictor, rows: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        predictor.predict(rows)
