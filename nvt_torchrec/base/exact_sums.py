"""Exact sums of numbers, which do not depend on the order of additions and subtractions.

A sum of floats depends on the order of its terms, and adding and subtracting a number leaves a
rounding error. Sums over events must have neither problem, because a log that is read in blocks, a
day that is added later and a row to score must give the same bits. So numbers are rounded to
multiples of :data:`STEP`, and a sum is an integer of 96 bits in three words of 32 bits. Each word
is summed separately in an int64, which has room for 2^31 terms; :func:`join_words` converts the
words to a float.
"""

from __future__ import annotations

import math

import numpy as np

from nvt_torchrec.base.kernels import compiled

#: The largest number that can be a term. Above it, float64 does not hold all integers.
LARGEST_TERM = 2.0**53
#: Numbers are rounded to multiples of this, 2.3e-13.
STEP = 2.0**-42
#: The number of words of a sum.
WORDS = 3

#: The values of a unit of the high and the middle word; that of the low word is STEP.
_HIGH = 2.0**22
_MIDDLE = 2.0**-10
_HALF_WORD = 2**31


def round_terms(numbers: np.ndarray) -> np.ndarray:
    """Round numbers within ±:data:`LARGEST_TERM` to multiples of :data:`STEP`; NaN stays NaN."""
    return np.rint(numbers / STEP) * STEP


@compiled()
def split_term(number: float) -> tuple[int, int, int]:
    """Return the words of a number that :func:`round_terms` returned; each has its sign."""
    high = math.trunc(number / _HIGH)
    rest = number - high * _HIGH
    middle = math.trunc(rest / _MIDDLE)
    return high, middle, math.trunc((rest - middle * _MIDDLE) / STEP)


@compiled()
def join_words(high: int, middle: int, low: int) -> float:
    """Convert the sums of the three words to a float."""
    # Carry until each lower word is within half a unit of the next higher one. Otherwise a small
    # sum could be computed as the difference of two large floats, and would lose its digits.
    carry = (low + _HALF_WORD) >> 32
    low -= carry << 32
    middle += carry
    carry = (middle + _HALF_WORD) >> 32
    middle -= carry << 32
    high += carry
    return high * _HIGH + (middle * _MIDDLE + low * STEP)


@compiled()
def split_terms(numbers: np.ndarray) -> np.ndarray:
    """Split numbers, float64 [n], as :func:`split_term` does; int64 [3, n], 0 for NaN."""
    words = np.zeros((WORDS, len(numbers)), np.int64)
    for i in range(len(numbers)):
        if not math.isnan(numbers[i]):
            words[0, i], words[1, i], words[2, i] = split_term(numbers[i])
    return words


@compiled()
def join_sums(words: np.ndarray) -> np.ndarray:
    """Convert sums of words, int64 [3, n], as :func:`join_words` does; float64 [n]."""
    sums = np.empty(words.shape[1])
    for i in range(words.shape[1]):
        sums[i] = join_words(words[0, i], words[1, i], words[2, i])
    return sums
