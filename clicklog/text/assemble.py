"""Make rows of converted columns, and describe the bad rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa

from clicklog.arrays import mask_to_arrow
from clicklog.rows import (
    DESCRIBED_BAD_ROWS,
    BadRow,
    CategoryValues,
    Jagged,
    RawRows,
    dense_dtype,
)
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.spec.reading import Read
from clicklog.text.convert import Converted
from clicklog.text.field_errors import describe_field_error
from clicklog.text.remedies import remedy_of


def assemble(
    spec: FeatureSpec,
    columns: Iterable[Converted],
    wrong: dict[int, str],
    text: Callable[[int], bytes],
    *,
    rows: int,
    label: bool,
    reject: bool,
) -> RawRows:
    """Make rows of columns; bad rows are left out and described.

    Args:
        spec: the columns.
        columns: the columns in spec order; the label first, if there is one.
        wrong: error messages of rows that are malformed as a whole, by row.
        text: returns the raw text of a row.
        rows: number of rows, bad ones included.
        label: whether there is a label.
        reject: describe every bad row, not only the first ``DESCRIBED_BAD_ROWS``.
    """
    names = spec.columns if label else spec.columns[1:]
    errors: dict[int, tuple[str, str]] = {row: ("", what) for row, what in wrong.items()}
    wrong_values: dict[int, tuple[Converted, Read]] = {}
    reads = spec.read_plan(label=label).reads
    labels = None
    dense = np.zeros((len(spec.dense), rows), dense_dtype(spec))
    categorical: list[CategoryValues] = []
    missing = np.zeros((2, rows), np.uint64)
    for position, (name, column) in enumerate(zip(names, columns, strict=True)):
        for row in np.flatnonzero(column.code).tolist():
            if row not in errors:  # the first wrong field of a row is described
                what = describe_field_error(name, column.show(row), int(column.code[row]))
                errors[row] = name, what
                wrong_values[row] = column, reads[position]
        j = position - label
        if j < 0:
            labels = column.values
            continue
        kind, bit = (0, j) if j < len(dense) else (1, j - len(dense))
        missing[kind] |= column.missing.astype(np.uint64) << np.uint64(bit)
        if kind == 0:
            dense[j] = column.values
        else:
            categorical.append(column.values)
    line = np.arange(rows, dtype=np.int64)
    if errors:
        good = np.ones(rows, bool)
        good[list(errors)] = False
        labels = None if labels is None else labels[good]
        # [:, good] would give arrays that are not contiguous: slower to read, and another type,
        # for which kernels would be compiled again
        dense, missing = (np.compress(good, two, axis=1) for two in (dense, missing))
        line = line[good]
        categorical = [_take(values, good) for values in categorical]
    shown = sorted(errors) if reject else sorted(errors)[:DESCRIBED_BAD_ROWS]
    remedies = {  # of the first ones: it takes longer than to describe an error
        row: remedy_of(*wrong_values[row], row)
        for row in shown[:DESCRIBED_BAD_ROWS]
        if row in wrong_values
    }
    return RawRows(
        label=labels,
        dense=dense,
        dense_missing=missing[0],
        categorical=np.stack(categorical) if spec.is_criteo_format else categorical,
        categorical_missing=missing[1],
        line=line,
        bad=[
            BadRow(row, errors[row][1], errors[row][0], text(row), remedies.get(row, ""))
            for row in shown
        ],
        bad_count=len(errors),
        lines=rows,
    )


def _take(values: CategoryValues, good: np.ndarray) -> CategoryValues:
    if isinstance(values, Jagged):
        lengths = np.diff(values.offsets)
        kept = _take(values.values, np.repeat(good, lengths))
        return Jagged(np.concatenate([[0], np.cumsum(lengths[good])]), kept)
    return values.filter(mask_to_arrow(good)) if isinstance(values, pa.Array) else values[good]
