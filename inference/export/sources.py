"""The arguments of an exported model: columns of the raw log, as tensors.

Features may be derived, and several may be read from one column of the log. So the arguments are
what is read, each once: numbers as float64, and integers, hexadecimal digits, times and the sources
of crosses as int64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from nvt_torchrec.formats.rows import Jagged
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.reading import Read
from nvt_torchrec.inference.inputs.columns import convert_values, read_as_text

#: Represents a missing integer, and pads lists to the length of the longest.
MISSING = -(2**63)


@dataclasses.dataclass(frozen=True)
class Sources:
    """Which columns of the log are the columns of each argument.

    Attributes:
        dense: Those of the first argument, numbers.
        categorical: Those of the second, integers.
        lists: Those of the third, a tensor each.
        of_dense: For each dense column of the spec, its sources: for each whether it is a number,
            and its index among ``dense`` or ``categorical``.
        of_categorical: Likewise for each categorical column; of a list, its index among ``lists``.
    """

    dense: tuple[Read, ...]
    categorical: tuple[Read, ...]
    lists: tuple[Read, ...]
    of_dense: tuple[tuple[tuple[bool, int], ...], ...]
    of_categorical: tuple[tuple[tuple[bool, int], ...], ...]

    @classmethod
    def of(cls, spec: FeatureSpec) -> Sources:
        """Return the arguments of a model of ``spec``."""
        plan = spec.read_plan(label=False)
        groups: tuple[dict[Read, tuple[int, Read]], ...] = ({}, {}, {})
        places = []
        for read in plan.reads:
            group = groups[2 if read.multi_hot else 0 if RAW_TYPES[read.raw].dense else 1]
            index, _ = group.setdefault(_argument(read), (len(group), read))
            places.append((group is groups[0], index))
        return cls(
            *(tuple(read for _, read in group.values()) for group in groups),
            tuple(tuple(places[index] for index in indexes) for indexes in plan.dense),
            tuple(tuple(places[index] for index in indexes) for indexes in plan.categorical),
        )


def _argument(read: Read) -> Read:
    """Return what reads have in common that can share a column of an argument.

    How a number or a time is written plays no role in tensors; what is called null does.
    """
    raw = "float" if RAW_TYPES[read.raw].dense else read.raw
    return Read(read.source, raw, read.multi_hot, read.nulls)


def to_inputs(
    rows: Sequence[Mapping[str, Any]], spec: FeatureSpec
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Convert rows, as the Predictor takes them, to the arguments of an exported model.

    Raises:
        InvalidRowError: A column cannot hold a value.
        ValueError: A source of a cross is not an integer.
    """
    sources = Sources.of(spec)
    text = read_as_text(spec.read_plan(label=False).reads)

    def column(read: Read) -> tuple[Any, np.ndarray]:
        values = [row[read.source] for row in rows]
        converted = convert_values(values, read, text=read.source in text)
        return converted.values, converted.missing

    def integers(read: Read) -> np.ndarray:
        values, missing = column(read)
        if isinstance(values, pa.Array):
            values = np.array([int(one or 0) for one in values.to_pylist()], np.int64)
        return np.where(missing, MISSING, values.astype(np.int64))

    def numbers(read: Read) -> np.ndarray:
        values, missing = column(read)
        return np.where(missing, np.nan, values.astype(np.float64))

    return (
        _stacked([numbers(read) for read in sources.dense], len(rows), np.float64),
        _stacked([integers(read) for read in sources.categorical], len(rows), np.int64),
        [padded(column(read)[0]) for read in sources.lists],
    )


def _stacked(columns: list[np.ndarray], rows: int, kind: type) -> torch.Tensor:
    return torch.from_numpy(np.stack(columns, 1) if columns else np.empty((rows, 0), kind))


def padded(values: Jagged) -> torch.Tensor:
    """Return lists of integers as a tensor."""
    lengths = np.diff(values.offsets)
    result = np.full((len(lengths), max(1, lengths.max(initial=0))), MISSING)
    result[np.arange(result.shape[1]) < lengths[:, None]] = values.values
    return torch.from_numpy(result)
