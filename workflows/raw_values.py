"""The first node of a loaded workflow: raw columns of the log → the columns of the graph.

The saved workflow has the spec, which says how a column is read: null texts, trimming, hexadecimal
digits, other names, derived columns. So what a loaded workflow transforms are rows as they stand in
the log, as text or as typed values, and ids are those of the ETL.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import nvt_torchrec.nvt_compat  # noqa: F401

import nvtabular
import pandas as pd
from merlin.schema import ColumnSchema, Schema
from nvtabular import ColumnSelector
from nvtabular.ops.operator import Operator

from nvt_torchrec.clicklog.in_memory.frames import check_columns, read_features
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.workflows.frames import features_to_frame
from nvt_torchrec.workflows.nodes import passed_through


class ReadRawValues(Operator):
    """Read columns of the log by the rules of a feature spec; pandas or cuDF, on the host.

    Raises:
        SchemaError: ``transform``: a column has a type that cannot hold the raw type.
        InvalidRowError: ``transform``: a value is malformed; row and column are named.
    """

    def __init__(self, spec: FeatureSpec, columns: Sequence[ColumnSchema]) -> None:
        """Read ``columns``, features or labels and weight of ``spec``."""
        super().__init__()
        self._spec = spec
        self._columns = Schema(list(columns))
        self._mapping = {column.name: spec.sources_of(column.name) for column in columns}

    @property
    def sources(self) -> list[str]:
        """The columns of the log that are read."""
        return list(dict.fromkeys(itertools.chain.from_iterable(self._mapping.values())))

    def transform(self, col_selector: ColumnSelector, df: Any) -> Any:
        """Return the typed columns, with the index of ``df``."""
        features = read_features(df, self._spec, self._columns.column_names)
        gpu = not isinstance(df, pd.DataFrame)
        frame = features_to_frame(features, passed_through(self._spec), gpu=gpu)
        frame.index = df.index
        return frame

    def column_mapping(self, col_selector: ColumnSelector) -> dict[str, list[str]]:
        """Return the columns of the log that each column is read or derived from."""
        return self._mapping

    def compute_output_schema(
        self, input_schema: Schema, col_selector: ColumnSelector, prev_output_schema: Any = None
    ) -> Schema:
        """Return the types of what is read, whatever those of the input are."""
        return self._columns


class RawWorkflow(nvtabular.Workflow):
    """A Workflow that names the columns of the log which its input lacks.

    Raises:
        MissingColumnError: ``transform``: a column that is read is not there.
    """

    def _transform_df(self, df: Any) -> Any:
        check_columns(df.columns, self._input_columns())
        return super()._transform_df(df)

    def _transform_impl(self, dataset: Any, capture_dtypes: bool = False) -> Any:
        check_columns(dataset.to_ddf().columns, self._input_columns())
        return super()._transform_impl(dataset, capture_dtypes)
