"""Sums that depend on nothing but their terms."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nvt_torchrec.base.exact_sums import (
    LARGEST_TERM,
    STEP,
    join_sums,
    round_terms,
    split_terms,
)

TERMS = st.floats(-LARGEST_TERM, LARGEST_TERM) | st.floats(-1, 1) | st.sampled_from([0.1, -1e-12])


@given(st.lists(st.tuples(TERMS, st.booleans()), min_size=1, max_size=50))
def test_sums_are_those_of_fractions(terms: list[tuple[float, bool]]) -> None:
    """Also of what is subtracted again, in any order: rounded once."""
    numbers = round_terms(np.array([number for number, _ in terms]))
    assert np.abs(numbers - [number for number, _ in terms]).max() <= STEP / 2
    words = split_terms(numbers)
    np.testing.assert_array_equal(join_sums(words), numbers)
    dropped = np.array([is_dropped for _, is_dropped in terms])
    total = words[:, ::-1].sum(axis=1) - words[:, dropped].sum(axis=1)
    exact = sum((Fraction(number) for number in numbers[~dropped]), Fraction())
    assert join_sums(total[:, np.newaxis])[0] == float(exact)


def test_room_for_many_large_terms() -> None:
    """2^31 of the largest numbers; a missing one counts as nothing."""
    largest = split_terms(np.array([LARGEST_TERM, -LARGEST_TERM, np.nan])) * 2**31
    np.testing.assert_array_equal(join_sums(largest), [2.0**84, -(2.0**84), 0])
    below = split_terms(np.array([LARGEST_TERM - 1, 1 - STEP])) * (2**31 - 1)
    assert join_sums(below)[0] == float((2**31 - 1) * (2**53 - 1))
