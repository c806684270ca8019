"""The raw types ``float``, ``weight`` and ``label``."""

# ruff: noqa: D102 - methods are described in RawType
from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import is_one_of
from nvt_torchrec.base.number_text import LARGEST_FLOAT32, parse_floats, use_decimal_point
from nvt_torchrec.formats.feature_spec.raw_types import base
from nvt_torchrec.formats.feature_spec.raw_types.integers import convert_numbers

if TYPE_CHECKING:
    from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Read


class Float(base.RawType):
    """Numbers that fit float32, held as float64."""

    name = "float"
    dtype = "float64"
    placeholder = 0.0
    dense = True
    has_point = True
    syntax = "expected a number or a missing value"
    out_of_range = "expected a finite number that fits float32"
    minimum, maximum = -LARGEST_FLOAT32, LARGEST_FLOAT32
    arrow_kinds = ("integer", "floating", "boolean", "decimal")
    keys = "nulls, trim, lenient, or decimal in [input]"

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> base.ParsedText:
        return parse_floats(texts, missing, read)

    def from_python(self, value: Any) -> float | None:
        if type(value) is not float or value != value:
            if base.is_missing(value):
                return None
            if isinstance(value, str | bytes):
                return self.parse_text(value)
            if not isinstance(value, int | float | np.number | np.bool_ | decimal.Decimal):
                raise ValueError(self.syntax)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) > self.maximum:
            raise ValueError(self.range_message)
        return number

    def convert_vectorized(self, values: list, kinds: set[type]) -> tuple[Any, np.ndarray] | None:
        if not kinds or not kinds <= {int, float}:
            return None
        return convert_numbers(self, values, np.float64)


class Weight(Float):
    """The weight of a row, which may not be missing."""

    name = "weight"
    dense = False
    minimum = 0
    syntax = "expected a weight, a number of at least 0"
    keys = "decimal in [input]"

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> base.ParsedText:
        parsed = super().from_text(texts, missing, read)
        # a number that does not fit float32 keeps its RANGE message, as in other columns
        parsed.code[missing | (parsed.values < 0)] = base.SYNTAX
        parsed.values[parsed.code != 0] = 0
        return parsed

    def from_arrow(self, array: pa.Array, read: Read) -> base.ParsedText:
        parsed = super().from_arrow(array, read)
        parsed.code[parsed.missing | (parsed.code != 0)] = base.SYNTAX
        return parsed


class Label(base.RawType):
    """Labels of 0 and 1, read by the rule ``Read.label``; they must not be missing."""

    name = "label"
    dtype = "uint8"
    has_point = True
    syntax = out_of_range = "expected a label of 0 or 1"
    minimum, maximum = 0, 1
    arrow_kinds = Float.arrow_kinds
    keys = "positive, threshold or trim in [label]"

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> base.ParsedText:
        rule = read.label
        if rule.positive:
            return _read_texts(rule, missing, partial(is_one_of, texts, trimmed=rule.trim))
        if rule.threshold is not None:
            parsed = parse_floats(texts, missing, read)
            parsed.code[missing | (parsed.code == base.SYNTAX)] = base.LABEL_NUMBER
            values = (parsed.values >= rule.threshold) & (parsed.code == 0)
            return base.ParsedText(values.astype(np.uint8), missing, parsed.code)
        texts = use_decimal_point(texts, read)
        values = is_one_of(texts, ("1", "1.0"))
        wrong = ~values & ~is_one_of(texts, ("0", "0.0"))
        code = np.where(wrong, base.SYNTAX, 0).astype(np.uint8)
        if wrong.any():  # other numbers, such as ratings, get RANGE: its remedy is a threshold
            numbers = parse_floats(texts, missing, read)
            is_number = ~missing & (numbers.code == 0)
            is_other = (numbers.values != 0) & (numbers.values != 1)
            code[wrong & is_number & is_other] = base.RANGE
        return base.ParsedText(values.astype(np.uint8), missing, code)

    def from_arrow(self, array: pa.Array, read: Read) -> base.ParsedText:
        rule = read.label
        if not rule.positive and rule.threshold is None:
            parsed = super().from_arrow(array, read)
            parsed.code[parsed.code != 0] = base.RANGE  # fractions, too
            parsed.code[parsed.missing] = base.SYNTAX
            return parsed
        numbers, missing = base.to_numbers(array, read.nulls)
        if rule.positive:
            present = np.where(missing, np.nan, numbers)
            return _read_texts(rule, missing, partial(base.match_number, present))
        values = ((numbers >= rule.threshold) & ~missing).astype(np.uint8)
        code = np.where(missing, base.LABEL_NUMBER, 0).astype(np.uint8)
        return base.ParsedText(values, missing, code)


def _read_texts(
    rule: LabelRule, missing: np.ndarray, match: Callable[[Sequence[str]], np.ndarray]
) -> base.ParsedText:
    """Read labels by the texts of their rule.

    Args:
        rule: The rule, which has ``positive``.
        missing: Where labels are missing, bool [n].
        match: Returns a mask of the labels that are one of the given texts, bool [n].
    """
    values = match(rule.positive)
    wrong = missing & ("" not in rule.negative)
    if rule.negative:
        wrong |= ~values & ~match(rule.negative) & ~missing
    code = np.where(wrong, base.OTHER_LABEL, 0).astype(np.uint8)
    return base.ParsedText((values & ~wrong).astype(np.uint8), missing, code)
