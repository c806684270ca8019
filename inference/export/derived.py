"""Derived columns in PyTorch's operators, with the results of :mod:`clicklog.derive`.

Each is a module that takes its sources: integers and times as int64, :data:`MISSING` where missing,
numbers as float64, NaN where missing.
"""

from __future__ import annotations

import functools
import re

import numpy as np
import torch
from torch import nn

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.clicklog.derive.columns import DAY, HOUR, log_square
from nvt_torchrec.formats.spec.limits import LARGEST_FLOAT32
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.reading import CROSS_SEPARATOR, Derivation
from nvt_torchrec.formats.spec.times import parse_iso
from nvt_torchrec.inference.export.sources import MISSING

#: 1970-01-01 was a Thursday.
_FIRST_WEEKDAY = 3
#: Days from 0000-03-01 to 1970-01-01, and of 400, 100 and 4 years and one that end with February.
_MARCH_YEAR_0, _ERA, _CENTURY, _FOUR_YEARS, _YEAR = 719_468, 146_097, 36_524, 1460, 365
_INTEGER = re.compile("0|-?[1-9][0-9]{0,18}").fullmatch


def module_of(how: Derivation) -> nn.Module:
    """Return the module of a rule other than a cross."""
    if how.kind == "age":
        return Age(parse_iso(how.reference, "reference") if how.reference else None)
    if how.kind == "bucket":
        return Bucket(how.boundaries)
    return LogSquare() if how.kind == "log_square" else TimePart(how.kind)


def missing(sources: list[torch.Tensor]) -> torch.Tensor:
    """Return where any source is missing, bool [n]."""
    absent = [x.isnan() if x.is_floating_point() else x == MISSING for x in sources]
    return functools.reduce(torch.logical_or, absent)


class TimePart(nn.Module):
    """The hour, weekday, day of the month or month of a time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        """Return int64 [n] of microseconds since 1970."""
        if self.kind == "hour":
            return _floor(time, HOUR) % 24
        days = _floor(time, DAY)
        if self.kind == "weekday":
            return (days + _FIRST_WEEKDAY) % 7
        # years begin in March: the leap day is the last of its year, century and era
        day = (days + _MARCH_YEAR_0) % _ERA
        leaps = _floor(day, _FOUR_YEARS) - _floor(day, _CENTURY) + _floor(day, _ERA - 1)
        year = _floor(day - leaps, _YEAR)
        day = day - (year * _YEAR + _floor(year, 4) - _floor(year, 100))
        month = _floor(5 * day + 2, 153)  # 0 is March
        if self.kind == "month":
            return (month + 2) % 12 + 1
        return day - _floor(153 * month + 2, 5) + 1


class Age(nn.Module):
    """The days from a time to a reference, or to another time."""

    def __init__(self, reference: int | None) -> None:
        super().__init__()
        self.reference = reference

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        """Return float64 [n]."""
        if second is None:
            return (self.reference - first).to(torch.float64) / DAY
        return (first - second).to(torch.float64) / DAY


class Bucket(nn.Module):
    """How many boundaries are not above a number."""

    def __init__(self, boundaries: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("boundaries", torch.tensor(boundaries, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return int64 [n]."""
        return torch.searchsorted(self.boundaries, x.contiguous(), right=True)


class LogSquare(nn.Module):
    """⌊(ln x)²⌋ above 2, by a table of where it increases: logarithms differ between libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.from_numpy(_steps()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return int64 [n]."""
        squares = torch.searchsorted(self.steps, x.contiguous(), right=True)
        # below the smallest int64 the conversion is undefined
        plain = x.clamp(RAW_TYPES["int"].least, 2).trunc().nan_to_num().to(torch.int64)
        return torch.where(x > 2, squares, plain)


@functools.cache
def _steps() -> np.ndarray:
    """Return the least number, float64, with each square of its logarithm from 1 on."""
    most = int(log_square(np.array([LARGEST_FLOAT32]))[0])
    wanted = np.arange(1, most + 1)
    # positive floats have the order of their bits: halve the range between 2 and the largest
    low = np.full(most, 2.0).view(np.int64)  # its square is too small
    high = np.full(most, LARGEST_FLOAT32).view(np.int64)  # its square is not
    while (high - low > 1).any():
        middle = low + (high - low) // 2
        enough = log_square(middle.view(np.float64)) >= wanted
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high.view(np.float64)


class Cross(nn.Module):
    """The place of a pair of integers among those of a vocabulary; -1 for other pairs.

    Args:
        column: The name of the column, for errors.
        values: The vocabulary.

    Raises:
        SettingsError: A value is not a pair of integers.
    """

    def __init__(self, column: str, values: list[str]) -> None:
        super().__init__()
        pairs = [value.split(CROSS_SEPARATOR) for value in values]
        for pair in pairs:
            for part in pair:
                if not _INTEGER(part) or not -(2**63) < int(part) < 2**63 or len(pair) != 2:
                    raise SettingsError(
                        f"column {column}: a cross of texts, such as {part!r}, which tensors "
                        "cannot hold; crosses of integers can be exported",
                        "export for Triton instead, or serve the bundle",
                    )
        numbers = np.array([list(map(int, pair)) for pair in pairs], np.int64).reshape(-1, 2)
        self.known = len(pairs) > 0
        if self.known:  # tensors without elements cannot be packed
            first, second = np.unique(numbers[:, 0]), np.unique(numbers[:, 1])
            self.register_buffer("first", torch.from_numpy(first))
            self.register_buffer("second", torch.from_numpy(second))
            places = np.searchsorted(first, numbers[:, 0]), np.searchsorted(second, numbers[:, 1])
            #: By value of the vocabulary, what :meth:`forward` gives for it.
            self.codes = places[0] * len(second) + places[1]

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return int64 [n]."""
        if not self.known:
            return torch.full_like(first, -1)
        row, row_known = _place(self.first, first)
        at, at_known = _place(self.second, second)
        return torch.where(row_known & at_known, row * len(self.second) + at, -1)


def _place(values: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of numbers among sorted ones, and whether they are there."""
    at = torch.searchsorted(values, x.contiguous()).clamp_max(len(values) - 1)
    return at, values[at] == x


def _floor(x: torch.Tensor, divisor: int) -> torch.Tensor:
    return torch.div(x, divisor, rounding_mode="floor")
