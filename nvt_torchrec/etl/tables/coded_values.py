"""Values of a categorical column as codes, indices into its distinct values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_parts, to_arrow, to_numpy, to_offsets
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.rows import CategoryValues, Jagged, get_flat_values, repeat_lists


@dataclasses.dataclass(frozen=True)
class CodedValues:
    """The values of ``n`` rows.

    Attributes:
        codes: int32 [n], or [items] for lists: the index of each value in ``distinct``.
        offsets: For lists int64 [n + 1], where the items of each row begin; else None.
        distinct: The distinct values, as integers or large strings. Some may be unused.
    """

    codes: np.ndarray
    offsets: np.ndarray | None
    distinct: np.ndarray | pa.Array

    def take(self, rows: np.ndarray) -> CodedValues:
        """Return the values of the given rows, int64 [n]."""
        if self.offsets is None:
            return dataclasses.replace(self, codes=self.codes[rows])
        lists = repeat_lists(Jagged(self.offsets, self.codes), rows)
        assert isinstance(lists.values, np.ndarray)
        return CodedValues(lists.values, lists.offsets, self.distinct)


def encode_values(values: CategoryValues) -> CodedValues:
    """Encode values; distinct values are in the order in which they first appear."""
    offsets = values.offsets.astype(np.int64) if isinstance(values, Jagged) else None
    encoded = pa.array(get_flat_values(values)).dictionary_encode()
    codes = to_numpy(encoded.indices)
    if isinstance(encoded.dictionary, pa.StringArray):
        return CodedValues(codes, offsets, encoded.dictionary.cast(pa.large_string()))
    if isinstance(encoded.dictionary, pa.LargeStringArray):
        return CodedValues(codes, offsets, encoded.dictionary)
    return CodedValues(codes, offsets, to_numpy(encoded.dictionary))


def join_distinct(
    codes: np.ndarray,
    offsets: np.ndarray | None,
    distinct: np.ndarray | pa.Array,
    sizes: Sequence[tuple[int, int]],
) -> CodedValues:
    """Join pieces that were encoded separately.

    Args:
        codes: int32 [items], the concatenated codes of the pieces, which are replaced in place.
        offsets: See :class:`CodedValues`.
        distinct: The concatenated distinct values of the pieces.
        sizes: The number of codes and the number of distinct values of each piece.
    """
    joined = encode_values(distinct)
    begin = 0
    first = 0
    for num_codes, num_distinct in sizes:
        piece = slice(begin, begin + num_codes)
        new_codes = joined.codes[first : first + num_distinct]
        codes[piece] = new_codes[codes[piece]]
        begin += num_codes
        first += num_distinct
    return CodedValues(codes, offsets, joined.distinct)


def concatenate_coded(first: CodedValues, second: CodedValues) -> CodedValues:
    """Join two pieces."""
    sizes = []
    for piece in (first, second):
        sizes.append((len(piece.codes), len(piece.distinct)))
    offsets = None
    if first.offsets is not None and second.offsets is not None:
        lengths = np.concatenate([np.diff(first.offsets), np.diff(second.offsets)])
        offsets = to_offsets(lengths)
    distinct: np.ndarray | pa.Array
    if isinstance(first.distinct, np.ndarray):
        distinct = np.concatenate([first.distinct, second.distinct])
    else:
        distinct = pa.concat_arrays([first.distinct, second.distinct])
    codes = np.concatenate([first.codes, second.codes])
    return join_distinct(codes, offsets, distinct, sizes)


def make_categorical_arrays(
    column: CategoricalColumn, values: CodedValues, missing: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the arrays of a column, by their kinds in :mod:`formats.table_files`.

    Codes of integers are in ascending order of the values, codes of strings in the order of their
    first appearance.
    """
    arrays: dict[str, np.ndarray] = {"missing": missing.astype(np.uint8)}
    if values.offsets is not None:
        arrays["lists"] = values.offsets
    codes, first_codes = _number_by_appearance(values.codes, len(values.distinct))
    if isinstance(values.distinct, np.ndarray):
        used = values.distinct[first_codes]
        order = np.argsort(used)
        ranks = np.empty(len(used), np.int32)
        ranks[order] = np.arange(len(used))
        arrays["values"] = used[order].astype(RAW_TYPES[column.raw].dtype)
        arrays["codes"] = ranks[codes]
        return arrays
    offsets, data = string_parts(values.distinct.take(to_arrow(first_codes)))
    begin, end = int(offsets[0]), int(offsets[-1])
    arrays["texts"] = offsets.astype(np.int64) - begin
    arrays["values"] = data[begin:end]
    arrays["codes"] = codes
    return arrays


@compiled()
def _number_by_appearance(codes: np.ndarray, num_distinct: int) -> tuple[np.ndarray, np.ndarray]:
    """Renumber codes in the order of their first appearance.

    Args:
        codes: int32 [n], each less than ``num_distinct``.
        num_distinct: Number of distinct values.

    Returns:
        The numbers, int32 [n]; the code of each number, int64 [numbers].
    """
    number_by_code = np.full(num_distinct, -1, np.int32)
    first_codes = np.empty(num_distinct, np.int64)
    numbers = np.empty(len(codes), np.int32)
    count = 0
    for i in range(len(codes)):
        code = codes[i]
        if number_by_code[code] < 0:
            number_by_code[code] = count
            first_codes[count] = code
            count += 1
        numbers[i] = number_by_code[code]
    return numbers, first_codes[:count]
