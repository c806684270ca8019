"""Assemble converted columns to rows: derive columns, hash keys, and remove bad rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import (
    blank_texts,
    mask_to_arrow,
    string_array,
    string_parts,
    to_numpy,
    to_offsets,
)
from nvt_torchrec.base.exact_sums import round_terms
from nvt_torchrec.base.hashing import join_hash, mix
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.text.convert import Converted
from nvt_torchrec.clicklog.text.wrong_fields import describe_row, find_wrong_fields
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DERIVATIONS, Derivation
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.read_plan import ReadPlan
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.rows import (
    DESCRIBED_BAD_ROWS,
    NO_TIME,
    CategoryValues,
    Jagged,
    RawRows,
    add_missing,
    get_dense_dtype,
    make_empty_mask,
)

#: The optional fields of ``RawRows``, arrays [n] or [..., n].
_OPTIONAL = tuple(field.name for field in dataclasses.fields(RawRows) if field.default is None)
#: The constants of FNV-1a (Fowler, Noll and Vo), a hash of bytes.
_FNV_BASIS = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)


def assemble(
    spec: FeatureSpec,
    columns: Iterable[Converted],
    text: Callable[[int], bytes],
    *,
    rows: int,
    label: bool,
    max_bad_rows: int,
) -> RawRows:
    """Assemble rows from their columns; bad rows are removed and described.

    Args:
        spec: The columns of the spec.
        columns: The columns that ``spec.read_plan(label=label)`` reads, in its order. A column that
            the file may lack is one of :func:`.convert.make_missing_column`.
        text: Returns the raw text of a row.
        rows: The number of rows, including bad ones.
        label: Whether rows have labels.
        max_bad_rows: If there are more bad rows, only the first ``DESCRIBED_BAD_ROWS`` are
            described, because the caller will stop.
    """
    plan = spec.read_plan(label=label)
    converted = list(columns)
    needs_time = spec.needs_time(label=label)
    key = _find_split_key(spec.split, None if plan.key is None else converted[plan.key])
    times = _find_times(spec, [converted[index] for index in plan.times], needs_time=needs_time)
    wrong_field = find_wrong_fields(spec, plan, converted, key, rows=rows, needs_time=needs_time)
    labels: list[Any] = []
    for index in plan.labels:
        if index is None:  # a constant label, or one that is added later from another file
            labels.append(np.ones(rows, np.uint8))
        else:
            labels.append(converted[index].values)
    weight: Any = None if plan.weight is None else converted[plan.weight].values
    join_times = None
    if plan.join_time is not None:
        join_times = get_row_times(converted[plan.join_time])[0]
    label_times: Any = None
    if plan.label_time is not None:
        label_times = converted[plan.label_time].values
    negative_times = None
    if plan.negative_time is not None:
        negative_times = get_row_times(converted[plan.negative_time])[0]
    dense, dense_missing = _assemble_dense(spec, plan, converted, rows)
    categorical, categorical_missing = _assemble_categorical(spec, plan, converted, rows)
    all_rows = RawRows(
        labels=np.stack(labels) if labels else np.empty((0, rows), np.uint8),
        dense=dense,
        dense_missing=dense_missing,
        categorical=categorical,
        categorical_missing=categorical_missing,
        line=np.arange(rows, dtype=np.int64),
        lines=rows,
        weight=None if weight is None else weight.astype(np.float32),
        key=key,
        times=times,
        groups=_hash_keys(plan.groups, converted, rows),
        amounts=_stack_amounts([converted[index] for index in plan.amounts], rows, times),
        join_times=join_times,
        table_keys=_hash_keys(plan.tables, converted, rows),
        negative_keys=_hash_keys(tuple((index,) for index in plan.negatives), converted, rows),
        negative_times=negative_times,
        label_keys=_hash_keys(plan.label_keys, converted, rows),
        label_times=label_times,
    )
    bad = np.flatnonzero(wrong_field >= 0)
    if not len(bad):
        return all_rows
    described = []
    for row in (bad if len(bad) <= max_bad_rows else bad[:DESCRIBED_BAD_ROWS]).tolist():
        index = int(wrong_field[row])
        described.append(describe_row(spec, plan, converted, row, index, text(row)))
    return dataclasses.replace(take(all_rows, wrong_field < 0), bad=described, bad_count=len(bad))


def _assemble_dense(
    spec: FeatureSpec, plan: ReadPlan, converted: list[Converted], rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``RawRows.dense`` and the mask of its missing values."""
    dense: Any = np.zeros((len(spec.dense), rows), get_dense_dtype(spec))
    missing = make_empty_mask(len(spec.dense), rows)
    for j, column in enumerate(spec.dense):
        if column.aggregate or column.table:  # added later, from other rows
            continue
        dense[j], absent = make_feature(column, [converted[index] for index in plan.dense[j]])
        add_missing(missing, j, absent)
    return dense, missing


def _assemble_categorical(
    spec: FeatureSpec, plan: ReadPlan, converted: list[Converted], rows: int
) -> tuple[Any, np.ndarray]:
    """Return ``RawRows.categorical`` and the mask of its missing values."""
    categorical: list[Any] = []
    missing = make_empty_mask(len(spec.categorical), rows)
    for j, column in enumerate(spec.categorical):
        if column.table:  # joined later
            categorical.append(make_missing_values(column, rows))
            continue
        values, absent = make_feature(column, [converted[index] for index in plan.categorical[j]])
        add_missing(missing, j, absent)
        categorical.append(values)
    return np.stack(categorical) if spec.is_criteo_format else categorical, missing


def _find_split_key(split: Split, column: Converted | None) -> np.ndarray | None:
    """Return ``RawRows.key``; -1 where a split by values does not name the text."""
    if column is None:
        return None
    values: Any = column.values
    if not isinstance(values, pa.Array):
        return values
    return _find_sides(values, split) if split.by == "values" else hash_texts(values)


def _find_times(
    spec: FeatureSpec, columns: list[Converted], *, needs_time: bool
) -> np.ndarray | None:
    """Return ``RawRows.times``.

    Args:
        spec: The columns of the spec.
        columns: The time of the event and, if the spec names one, the time at which it is known.
        needs_time: Whether the rows are events; otherwise they are rows to score.
    """
    if columns and not needs_time:
        return get_row_times(columns[0])
    if not columns or not spec.events:
        return None
    happened: Any = columns[0].values
    known: Any = columns[1].values if len(columns) > 1 else happened + spec.events.delay
    # An event is known only when its labels are: clicks may come until the end of their window.
    return np.stack([happened, np.maximum(happened + spec.label_window, known)])


def _find_sides(values: pa.StringArray, split: Split) -> np.ndarray:
    """Return the index in ``SPLITS`` of each row of a split by values.

    Args:
        values: Strings [n].
        split: The split, which names the texts of each part.

    Returns:
        int64 [n]; -1 where the split does not name the text.
    """
    split_of_value = split.split_of_value
    known = pa.array(list(split_of_value), values.type)
    unknown = pa.scalar(len(split_of_value), pa.int32())  # the position of -1 below
    positions = pc.coalesce(pc.index_in(values, known), unknown)
    return np.array([*split_of_value.values(), -1], np.int64)[to_numpy(positions)]


def _stack_amounts(
    columns: list[Converted], rows: int, times: np.ndarray | None
) -> np.ndarray | None:
    """Return ``RawRows.amounts``; None for rows that are not events."""
    if times is None or len(times) == 1:
        return None
    amounts = np.empty((len(columns), rows))
    for j, column in enumerate(columns):
        assert isinstance(column.values, np.ndarray)
        amounts[j] = np.where(column.missing, np.nan, round_terms(column.values))
    return amounts


def _hash_keys(
    keys: tuple[tuple[int, ...], ...], converted: list[Converted], rows: int
) -> np.ndarray | None:
    """Hash the keys whose columns have these indices in ``converted``; see :func:`hash_keys`."""
    columns = []
    for indices in keys:
        columns.append([converted[index].parts for index in indices])
    return hash_keys(columns, rows)


def get_row_times(time: Converted) -> np.ndarray:
    """Return ``RawRows.times`` of rows without labels, which have only their own time."""
    assert isinstance(time.values, np.ndarray)
    return np.where(time.missing, NO_TIME, time.values)[np.newaxis]


def hash_keys(keys: list[list[tuple[CategoryValues, np.ndarray]]], rows: int) -> np.ndarray | None:
    """Hash the keys of events or tables; None if there are no keys.

    Args:
        keys: For each key, the values [n] of each of its columns, and where they are missing,
            bool [n].
        rows: The number of rows.

    Returns:
        int64 [keys, n], 0 where a column of the key is missing.
    """
    if not keys:
        return None
    hashed = []
    for columns in keys:
        if not columns:  # all rows have the same key
            hashed.append(np.ones(rows, np.int64))
            continue
        values, missing = columns[0]
        key = _hash_values(values)
        for values, absent in columns[1:]:
            key = join_hashes(key, _hash_values(values))
            missing = missing | absent
        key[key == 0] = 1  # 0 stands for a missing key
        key[missing] = 0
        hashed.append(key)
    return np.array(hashed)


def _hash_values(values: CategoryValues) -> np.ndarray:
    """Hash strings or integers [n]; int64 [n]."""
    if isinstance(values, pa.Array):
        return hash_texts(values)
    assert isinstance(values, np.ndarray)  # a column of a key holds no lists
    return _hash_integers(values.astype(np.int64, copy=False))


def make_feature(
    column: DenseColumn | CategoricalColumn, sources: list[Converted]
) -> tuple[CategoryValues, np.ndarray]:
    """Return the values of a column and where they are missing, bool [n]."""
    missing = sources[0].missing
    if column.derive is None:
        return sources[0].values, missing
    for source in sources[1:]:
        missing = missing | source.missing
    return derive(column.derive, [source.values for source in sources], missing), missing


def make_missing_values(column: CategoricalColumn, rows: int) -> CategoryValues:
    """Return the values of a column that is missing in all rows."""
    values = RAW_TYPES[column.raw].array([])
    if column.multi_hot:
        return Jagged(np.zeros(rows + 1, np.int64), values)
    if isinstance(values, np.ndarray):
        return np.zeros(rows, values.dtype)
    return _blank_texts(rows)


@functools.lru_cache(8)
def _blank_texts(count: int) -> pa.StringArray:
    """Return strings that are all ""; cached, because columns of tables share them until joined."""
    return string_array(np.zeros(count + 1, np.int32), np.empty(0, np.uint8))


def _take_values(values: CategoryValues, good: np.ndarray) -> CategoryValues:
    """Return the values of the rows where ``good``, bool [n], is set."""
    if isinstance(values, Jagged):
        lengths = np.diff(values.offsets)
        kept = _take_values(values.values, np.repeat(good, lengths))
        return Jagged(to_offsets(lengths[good]), kept)
    if isinstance(values, pa.Array):
        offsets, _ = string_parts(values)
        if offsets[0] == offsets[-1]:
            # All are "", as in columns that are joined later, so any slice will do.
            return values.slice(0, np.count_nonzero(good))
        return values.filter(mask_to_arrow(good))
    return values[good]


def take(rows: RawRows, mask: np.ndarray) -> RawRows:
    """Return the rows where ``mask``, bool [n], is set; descriptions of bad rows are dropped.

    If the mask is set for all rows, the result shares their arrays.
    """
    if mask.all():
        return dataclasses.replace(rows, bad=[], bad_count=0)
    kept: dict[str, Any] = {}
    for name in ("labels", "dense", "dense_missing", "categorical_missing", "line", *_OPTIONAL):
        values = getattr(rows, name)
        if values is not None:
            # values[:, mask] would not be contiguous: slower to read, and of another type, for
            # which Numba would compile kernels again
            kept[name] = np.compress(mask, values, axis=-1)
    categorical = rows.categorical
    if isinstance(categorical, np.ndarray):
        categorical = np.compress(mask, categorical, axis=1)
    else:
        categorical = [_take_values(values, mask) for values in categorical]
    return dataclasses.replace(rows, categorical=categorical, bad=[], bad_count=0, **kept)


def derive(
    how: Derivation, sources: Sequence[np.ndarray | pa.StringArray], missing: np.ndarray
) -> np.ndarray | pa.StringArray:
    """Compute a derived column; where it is missing, its values are 0 or "".

    Args:
        how: The derivation.
        sources: The values [n] of its sources, of the raw type that it reads.
        missing: Where any source is missing, bool [n].
    """
    values = DERIVATIONS[how.kind].compute(sources, how)
    if isinstance(values, pa.Array):
        return blank_texts(values, missing)
    values[missing] = 0
    return values.astype(RAW_TYPES[how.gives].dtype, copy=False)


def hash_texts(values: pa.StringArray) -> np.ndarray:
    """Hash strings [n]; int64 [n]. The hash must never change between versions."""
    offsets, data = string_parts(values)
    return _hash_texts(offsets, data).view(np.int64)


@compiled()
def _hash_integers(values: np.ndarray) -> np.ndarray:
    """Hash integers, int64 [n]; int64 [n]."""
    hashed = np.empty(len(values), np.int64)
    for i in range(len(values)):
        hashed[i] = join_hash(values[i], 0)
    return hashed


@compiled()
def join_hashes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Hash the pairs of two hashes, int64 [n] each; int64 [n]."""
    joined = np.empty(len(first), np.int64)
    for i in range(len(first)):
        joined[i] = join_hash(first[i], second[i])
    return joined


@compiled()
def _hash_texts(offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Hash texts by their offsets [n + 1] and UTF-8 bytes; uint64 [n]."""
    hashes = np.empty(len(offsets) - 1, np.uint64)
    for i in range(len(hashes)):
        hashed = _FNV_BASIS
        for at in range(offsets[i], offsets[i + 1]):
            hashed = (hashed ^ np.uint64(data[at])) * _FNV_PRIME
        # FNV-1a mixes its bits poorly, so MurmurHash3's finalizer mixes them once more.
        hashes[i] = mix(hashed)
    return hashes
