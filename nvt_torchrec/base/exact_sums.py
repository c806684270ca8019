"""Exact sums of numbers: whatever their order, and whatever was added and subtracted since.

A sum of floats depends on the order of its terms, and a number that is added and subtracted again
leaves a rest. Sums over events must do neither: a log that is read in blocks, a day that is added
and a row to score have to give the same bits. So numbers are multiples of :data:`STEP`, and their
sums are integers of 96 bits, in three words of 32 bits. Words are summed up in int64, each by
itself, which has room for the sums of 2^31 numbers; :func:`join_words` makes a float of them.
"""

from __future__ import annotations

import math

import numpy as np

from nvt_torchrec.base.kernels import compiled

#: The largest number that can be summed up. Beyond it, float64 does not hold all whole numbers.
LARGEST_TERM = 2.0**53
#: Numbers are rounded to multiples of this, 2.3e-13.
STEP = 2.0**-42
#: How many words a sum has.
WORDS = 3

#: What a unit of each word stands for; the last one is STEP.
_HIGH = 2.0**22
_MIDDLE = 2.0**-10
_HALF_WORD = 2**31


def round_terms(numbers: np.ndarray) -> np.ndarray:
    """Return numbers within ±:data:`LARGEST_TERM` as multiples of :data:`STEP`; NaN stays."""
    return np.rint(numbers / STEP) * STEP


@compiled()
def split_term(number: float) -> tuple[int, int, int]:
    """Return the words of a number that :func:`round_terms` returned; all have its sign."""
    high = math.trunc(number / _HIGH)
    rest = number - high * _HIGH
    middle = math.trunc(rest / _MIDDLE)
    return high, middle, math.trunc((rest - middle * _MIDDLE) / STEP)


@compiled()
def join_words(high: int, middle: int, low: int) -> float:
    """Return the sum that the sums of words stand for, as a float."""
    # The lower words become less than half of a unit of the one above, in either direction. Else a
    # small sum could be the difference of two large floats, and would lose its digits.
    carry = (low + _HALF_WORD) >> 32
    low -= carry << 32
    middle += carry
    carry = (middle + _HALF_WORD) >> 32
    middle -= carry << 32
    high += carry
    return high * _HIGH + (middle * _MIDDLE + low * STEP)


@compiled()
def split_terms(numbers: np.ndarray) -> np.ndarray:
    """Return the words of numbers, float64 [n], see :func:`split_term`; int64 [3, n], 0 for NaN."""
    words = np.zeros((WORDS, len(numbers)), np.int64)
    for i in range(len(numbers)):
        if not math.isnan(numbers[i]):
            words[0, i], words[1, i], words[2, i] = split_term(numbers[i])
    return words


@compiled()
def join_sums(words: np.ndarray) -> np.ndarray:
    """Return what sums of words stand for, int64 [3, n]; float64 [n]."""
    sums = np.empty(words.shape[1])
    for i in range(words.shape[1]):
        sums[i] = join_words(words[0, i], words[1, i], words[2, i])
    return sums
