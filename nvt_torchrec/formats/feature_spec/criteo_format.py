"""Criteo's text format, for which there is a faster parser."""

from __future__ import annotations

from collections.abc import Sequence

from nvt_torchrec.formats.feature_spec.columns import (
    WORD_BITS,
    CategoricalColumn,
    DenseColumn,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.read_plan import AS_IT_IS


def is_criteo_format(
    layout: InputFormat, dense: Sequence[DenseColumn], categorical: Sequence[CategoricalColumn]
) -> bool:
    """Return whether files have columns of Criteo's types in Criteo's layout.

    They are tab-separated without a header; dense columns are int32, categorical columns hold one
    hex32 value in each row, and a mask of the missing values of either kind fits one word.
    """
    criteo_layout = InputFormat(
        max_line_kb=layout.max_line_kb, list_separator=layout.list_separator
    )
    columns: list[DenseColumn | CategoricalColumn] = [*dense, *categorical]
    return (
        all(column.reading == AS_IT_IS and column.derive is None for column in columns)
        and max(len(dense), len(categorical)) <= WORD_BITS
        and layout == criteo_layout
        and all(column.raw == "int32" for column in dense)
        and all(column.raw == "hex32" and not column.multi_hot for column in categorical)
    )
