"""Make rows of converted columns, derive columns, and describe the bad rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import (
    blanked,
    mask_to_arrow,
    string_array,
    string_parts,
    to_numpy,
)
from nvt_torchrec.base.exact_sums import LARGEST_TERM, round_terms
from nvt_torchrec.base.hashing import mix
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.text.convert import Converted
from nvt_torchrec.clicklog.text.remedies import correct_or, value_remedy
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DERIVATIONS, Derivation
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.rows import (
    DESCRIBED_BAD_ROWS,
    NO_TIME,
    BadRow,
    CategoryValues,
    Jagged,
    RawRows,
    add_missing,
    dense_dtype,
    describes,
    empty_mask,
)

#: Fields of rows that only some specs have: [n] or [.., n].
_OPTIONAL = tuple(field.name for field in dataclasses.fields(RawRows) if field.default is None)
#: Of a text that a split by values does not name.
_NAME_IT = "add it to train, valid or test of [split] in the spec"
#: Of a number that aggregates cannot sum up.
_TOO_LARGE = "expected a number from -2^53 to 2^53, as [[aggregate]] makes sums of the column"
_LIST_IT = "add it to nulls of the column in [[dense]], if it stands for a missing value"
#: Of FNV-1a (Fowler, Noll and Vo), whose low bits are mixed once more, by MurmurHash3's finalizer.
_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


def assemble(
    spec: FeatureSpec,
    columns: Iterable[Converted],
    text: Callable[[int], bytes],
    *,
    rows: int,
    label: bool,
    reject: bool | int,
) -> RawRows:
    """Make rows of what was read, deriving columns; bad rows are left out and described.

    Args:
        spec: The columns.
        columns: What ``spec.read_plan(label=label)`` reads, in its order; see
            :func:`.convert.missing_column` for those that may lack.
        text: Returns the raw text of a row.
        rows: Number of rows, bad ones included.
        label: Whether rows have labels.
        reject: Describe every bad row, not only the first ``DESCRIBED_BAD_ROWS``.
    """
    plan = spec.read_plan(label=label)
    converted: Any = list(columns)
    needs_time = spec.needs_time(label=label)
    needed: tuple[int | None, ...] = (plan.weight, plan.key)
    if needs_time:
        needed = (*needed, *plan.times, plan.join_time)
    first_wrong = np.full(rows, -1)  # the first wrong field of a row is described
    for index, column in enumerate(converted):
        wrong = column.code != 0
        if index in needed:
            wrong = wrong | column.missing
        if index in plan.amounts:
            wrong = wrong | (np.abs(column.values) > LARGEST_TERM)
        if wrong.any():
            first_wrong[wrong & (first_wrong < 0)] = index
    labels = [converted[index].values for index in plan.labels]
    weight = None if plan.weight is None else converted[plan.weight].values.astype(np.float32)
    key = None if plan.key is None else converted[plan.key].values
    if isinstance(key, pa.Array) and spec.split.by == "values":
        key = _find_sides(key, spec.split)
        first_wrong[(key < 0) & (first_wrong < 0)] = plan.key
    elif isinstance(key, pa.Array):
        key = hash_texts(key)
    times = None
    if plan.times and not needs_time:
        times = times_of_rows(converted[plan.times[0]])
    elif plan.times and spec.events:
        happened, *known = (converted[index].values for index in plan.times)
        known = known[0] if known else happened + spec.events.delay
        times = np.stack([happened, np.maximum(happened, known)])  # no row knows its own label
    if times is not None and spec.events and spec.events.between:
        first, end = spec.events.between
        outside = (times[0] < first) | (times[0] >= end)
        first_wrong[outside & (first_wrong < 0)] = plan.times[0]
    join_times = None
    if plan.join_time is not None:
        join_times = times_of_rows(converted[plan.join_time])[0]
    dense: Any = np.zeros((len(spec.dense), rows), dense_dtype(spec))
    categorical: list[Any] = []
    missing = [empty_mask(len(spec.dense), rows), empty_mask(len(spec.categorical), rows)]
    for j, column in enumerate(spec.dense):
        if column.aggregate or column.table:  # added later, of other rows
            continue
        dense[j], absent = feature(column, [converted[index] for index in plan.dense[j]])
        add_missing(missing[0], j, absent)
    for j, column in enumerate(spec.categorical):
        if column.table:  # joined later
            categorical.append(empty_values(column, rows))
            continue
        values, absent = feature(column, [converted[index] for index in plan.categorical[j]])
        add_missing(missing[1], j, absent)
        categorical.append(values)
    every = RawRows(
        labels=np.stack(labels) if labels else np.empty((0, rows), np.uint8),
        dense=dense,
        dense_missing=missing[0],
        categorical=np.stack(categorical) if spec.is_criteo_format else categorical,
        categorical_missing=missing[1],
        line=np.arange(rows, dtype=np.int64),
        lines=rows,
        weight=weight,
        key=key,
        times=times,
        groups=hash_keys([[converted[i].parts for i in key] for key in plan.groups], rows),
        amounts=_stack_amounts([converted[index] for index in plan.amounts], rows, times),
        join_times=join_times,
        table_keys=hash_keys([[converted[i].parts for i in key] for key in plan.tables], rows),
    )
    bad = np.flatnonzero(first_wrong >= 0)
    if not len(bad):
        return every

    def described(row: int) -> BadRow:
        index = int(first_wrong[row])
        read, column = plan.reads[index], converted[index]
        value, code = column.show(row), int(column.code[row])
        if code:
            remedy = value_remedy(read, code, missing=bool(column.missing[row]))
            what = f"column {read.source}: {value}: {RAW_TYPES[read.raw].message(code)}"
            return BadRow(row, what, read.source, text(row), correct_or(remedy))
        if index in plan.times and not column.missing[row]:
            what = (
                f"column {read.source}: {value}: {_describe_outside(spec, int(column.values[row]))}"
            )
            return BadRow(row, what, read.source, text(row), "correct its time")
        if index in plan.amounts and not column.missing[row]:
            what = f"column {read.source}: {value}: {_TOO_LARGE}"
            return BadRow(row, what, read.source, text(row), correct_or(_LIST_IT))
        if index == plan.key and not column.missing[row]:
            what = f"column {read.source}: {value}: the [split] of the spec does not name it"
            return BadRow(row, what, read.source, text(row), correct_or(_NAME_IT))
        role = "weight" if index == plan.weight else "column by which rows are split"
        if index in (*plan.times, plan.join_time) and index != plan.key:
            role = "time of an event"
        what = f"column {read.source}: {value}: the {role} must not be missing"
        return BadRow(row, what, read.source, text(row))

    shown = bad if describes(reject, len(bad)) else bad[:DESCRIBED_BAD_ROWS]
    return dataclasses.replace(
        take(every, first_wrong < 0),
        bad=[described(row) for row in shown.tolist()],
        bad_count=len(bad),
    )


def _find_sides(values: pa.StringArray, split: Split) -> np.ndarray:
    """Return the index in ``SPLITS`` that a split by values gives strings [n]; -1: none; int64."""
    sides = split.side_of_value
    texts = pa.array(list(sides), values.type)
    index = pc.coalesce(pc.index_in(values, texts), pa.scalar(len(sides), pa.int32()))
    return np.array([*sides.values(), -1], np.int64)[to_numpy(index)]


def _describe_outside(spec: FeatureSpec, time: int) -> str:
    """Describe what is wrong with a time that is not between those that rows may have."""
    assert spec.events is not None
    assert spec.events.between is not None
    first, end = spec.events.between
    if time < first:
        # an event of a source counts from its time plus its delay, a row from its time
        newest = first + spec.events.delay if spec.of_source else first
        return (
            f"a row of {format_time(time)} is older than rows of the days before, which were "
            f"written without it; the newest is of {format_time(newest)}"
        )
    return f"a row of {format_time(time)} is long after all others, which end at {format_time(end)}"


def _stack_amounts(
    columns: list[Converted], rows: int, times: np.ndarray | None
) -> np.ndarray | None:
    """Return ``RawRows.amounts``; None of rows that are no events."""
    if times is None or len(times) == 1:
        return None
    amounts = np.empty((len(columns), rows))
    for j, column in enumerate(columns):
        assert isinstance(column.values, np.ndarray)
        amounts[j] = np.where(column.missing, np.nan, round_terms(column.values))
    return amounts


def times_of_rows(time: Converted) -> np.ndarray:
    """Return ``RawRows.times`` of rows without labels, of which only their own time is known."""
    assert isinstance(time.values, np.ndarray)
    return np.where(time.missing, NO_TIME, time.values)[np.newaxis]


def hash_keys(keys: list[list[tuple[CategoryValues, np.ndarray]]], rows: int) -> np.ndarray | None:
    """Hash the keys of groups of events or of tables; None if there are none.

    Args:
        keys: Of each group or table, the values [n] of each column of its key, and where they are
            missing, bool [n].
        rows: The number of rows.

    Returns:
        ``RawRows.groups`` or ``RawRows.table_keys``: int64 [keys, n], 0 where a column is missing.
    """
    if not keys:
        return None
    hashed = []
    for columns in keys:
        if not columns:  # all rows have the same key
            hashed.append(np.ones(rows, np.int64))
            continue
        (values, missing), *others = columns
        key = _hash_values(values)
        for values, absent in others:
            key, missing = join_hashes(key, _hash_values(values)), missing | absent
        key[key == 0] = 1  # 0 is for a key that is missing
        key[missing] = 0
        hashed.append(key)
    return np.array(hashed)


def _hash_values(values: CategoryValues) -> np.ndarray:
    """Hash strings or integers [n]; int64 [n]."""
    if isinstance(values, pa.Array):
        return hash_texts(values)
    assert isinstance(values, np.ndarray)  # a key has one value a row
    return join_hashes(values.astype(np.int64), np.zeros(len(values), np.int64))


def feature(
    column: DenseColumn | CategoricalColumn, sources: list[Converted]
) -> tuple[CategoryValues, np.ndarray]:
    """Return the values of a column and where they are missing, bool [n]."""
    missing = sources[0].missing
    if column.derive is None:
        return sources[0].values, missing
    for source in sources[1:]:
        missing = missing | source.missing
    return derive(column.derive, [source.values for source in sources], missing), missing


def empty_values(column: CategoricalColumn, rows: int) -> CategoryValues:
    """Return the values of a column that is missing in all rows."""
    values = RAW_TYPES[column.raw].array([])
    if column.multi_hot:
        return Jagged(np.zeros(rows + 1, np.int64), values)
    if isinstance(values, np.ndarray):
        return np.zeros(rows, values.dtype)
    return string_array(np.zeros(rows + 1, np.int32), np.empty(0, np.uint8))


def _take(values: CategoryValues, good: np.ndarray) -> CategoryValues:
    if isinstance(values, Jagged):
        lengths = np.diff(values.offsets)
        kept = _take(values.values, np.repeat(good, lengths))
        return Jagged(np.concatenate([[0], np.cumsum(lengths[good])]), kept)
    return values.filter(mask_to_arrow(good)) if isinstance(values, pa.Array) else values[good]


def take(rows: RawRows, mask: np.ndarray) -> RawRows:
    """Return the rows where ``mask``, bool [n], is set, without the bad rows; lines are kept."""
    # [:, mask] would give arrays that are not contiguous: slower to read, and another type, for
    # which kernels would be compiled again
    of_rows: dict[str, Any] = {
        name: None if values is None else np.compress(mask, values, axis=-1)
        for name in ("labels", "dense", "dense_missing", "categorical_missing", "line", *_OPTIONAL)
        for values in [getattr(rows, name)]
    }
    categorical = rows.categorical
    if isinstance(categorical, np.ndarray):
        categorical = np.compress(mask, categorical, axis=1)
    else:
        categorical = [_take(values, mask) for values in categorical]
    return dataclasses.replace(rows, categorical=categorical, bad=[], bad_count=0, **of_rows)


def derive(
    how: Derivation, sources: Sequence[np.ndarray | pa.StringArray], missing: np.ndarray
) -> np.ndarray | pa.StringArray:
    """Compute a column; where it is missing, its values are 0 or "".

    Args:
        how: The rule.
        sources: The values [n] of its sources, of the raw type that the rule reads.
        missing: bool [n], where any source is missing.
    """
    values = DERIVATIONS[how.kind].compute(sources, how)
    if isinstance(values, pa.Array):
        return blanked(values, missing)
    values[missing] = 0
    return values.astype(RAW_TYPES[how.gives].dtype, copy=False)


def hash_texts(values: pa.StringArray) -> np.ndarray:
    """Hash strings [n]; int64 [n]. The hash of a text never changes between versions."""
    offsets, data = string_parts(values)
    return _hash_texts(offsets, data).view(np.int64)


@compiled()
def join_hashes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Hash the pairs of two hashes, int64 [n] each; int64 [n]."""
    joined = np.empty(len(first), np.int64)
    for i in range(len(first)):
        joined[i] = np.int64(mix(mix(np.uint64(first[i])) + np.uint64(second[i])))
    return joined


@compiled()
def _hash_texts(offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
    hashes = np.empty(len(offsets) - 1, np.uint64)
    for i in range(len(hashes)):
        hashed = _BASIS
        for at in range(offsets[i], offsets[i + 1]):
            hashed = (hashed ^ np.uint64(data[at])) * _PRIME
        hashes[i] = mix(hashed)
    return hashes
