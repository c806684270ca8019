"""Find the field that makes a row bad, and describe bad rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nvt_torchrec.base.exact_sums import LARGEST_TERM
from nvt_torchrec.clicklog.text.convert import Converted
from nvt_torchrec.clicklog.text.remedies import suggest_correction, suggest_value_remedy
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.feature_spec.read_plan import ReadPlan
from nvt_torchrec.formats.rows import BadRow

#: The remedy for a text that a split by values does not name.
_ADD_TO_SPLIT = "add it to train, valid or test of [split] in the spec"
#: The message and the remedy for a number that is too large to be aggregated.
_TOO_LARGE = "expected a number from -2^53 to 2^53, because an [[aggregate]] sums the column"
_ADD_TO_NULLS = "add it to nulls of the column in [[dense]], if it stands for a missing value"


def find_wrong_fields(
    spec: FeatureSpec,
    plan: ReadPlan,
    columns: Sequence[Converted],
    key: np.ndarray | None,
    *,
    rows: int,
    needs_time: bool,
) -> np.ndarray:
    """Return the index in ``columns`` of each row's first wrong field, int64 [n]; -1 if none is.

    Args:
        spec: The columns of the spec.
        plan: The plan of the columns.
        columns: The columns that were read, in the order of ``plan.reads``.
        key: The value by which rows are split, see ``RawRows.key``; -1 for a text that the split
            does not name.
        rows: The number of rows.
        needs_time: Whether times must not be missing.
    """
    required: set[int | None] = {plan.weight, plan.key}
    if needs_time:
        required |= {*plan.times, plan.join_time, plan.label_time}
    wrong_field = np.full(rows, -1)

    def mark(wrong: np.ndarray, index: int) -> None:
        if wrong.any():  # nearly always false, and faster than the assignment
            wrong_field[wrong & (wrong_field < 0)] = index

    for index, column in enumerate(columns):
        wrong = column.code != 0
        if index in required:
            wrong = wrong | column.missing
        if index in plan.amounts:
            amounts: Any = column.values
            wrong = wrong | (np.abs(amounts) > LARGEST_TERM)
        mark(wrong, index)
    # Well-formed values that the spec does not allow are reported after malformed ones.
    if key is not None and plan.key is not None and spec.split.by == "values":
        mark(key < 0, plan.key)
    bounded, between = _find_bounds(spec, plan)
    if bounded is not None and between is not None:
        happened: Any = columns[bounded].values
        mark((happened < between[0]) | (happened >= between[1]), bounded)
    return wrong_field


def _find_bounds(spec: FeatureSpec, plan: ReadPlan) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the index of a row's time, and its allowed half-open range; None for any times."""
    if spec.events and plan.times:
        return plan.times[0], spec.events.between
    return plan.label_time, spec.label_times_between


def describe_row(
    spec: FeatureSpec,
    plan: ReadPlan,
    columns: Sequence[Converted],
    row: int,
    index: int,
    text: bytes,
) -> BadRow:
    """Describe a row whose first wrong field is ``plan.reads[index]``.

    Args:
        spec: The columns of the spec.
        plan: The plan of the columns.
        columns: The columns that were read, in the order of ``plan.reads``.
        row: The index of the row.
        index: The index of the field.
        text: The raw text of the row.
    """
    read = plan.reads[index]
    column = columns[index]
    code = int(column.code[row])
    is_missing = bool(column.missing[row])
    remedy = ""
    if code:
        what = RAW_TYPES[read.raw].message(code)
        remedy = suggest_correction(suggest_value_remedy(read, code, missing=is_missing))
    elif is_missing:
        what = f"the {_find_role(plan, index)} must not be missing"
    elif index == _find_bounds(spec, plan)[0]:
        times: Any = column.values
        what = _describe_outside(spec, _find_bounds(spec, plan)[1], int(times[row]))
        remedy = "correct its time"
    elif index in plan.amounts:
        what = _TOO_LARGE
        remedy = suggest_correction(_ADD_TO_NULLS)
    else:
        what = "the [split] of the spec does not name it"
        remedy = suggest_correction(_ADD_TO_SPLIT)
    what = f"column {read.source}: {column.show(row)}: {what}"
    return BadRow(row, what, read.source, text, remedy)


def _find_role(plan: ReadPlan, index: int) -> str:
    """Return the role of a field that must not be missing."""
    if index == plan.weight:
        return "weight"
    if index == plan.key:
        return "column by which rows are split"
    return "time of an event"


def _describe_outside(spec: FeatureSpec, between: tuple[int, ...] | None, time: int) -> str:
    """Describe the error of a time outside of the range that rows may have."""
    assert between is not None
    first, end = between
    if time < first:
        newest = first
        if spec.is_source and spec.events:
            # an event of a source counts from its time plus its delay, which the range includes
            newest = first + spec.events.delay
        return (
            f"a row of {format_time(time)} is older than rows of earlier days, which were written "
            f"without it; the newest of them is of {format_time(newest)}"
        )
    return (
        f"a row of {format_time(time)} is long after all other rows, which end at "
        f"{format_time(end)}"
    )
