"""Counts of the card are those of the cpu engine."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.etl.engines.counting import Counts, count, merge
from nvt_torchrec.etl.engines.device.counts import (
    count_on_device,
    merge_on_device,
    to_device,
    to_host,
)
from tests.simulator.device import SimulatedDevice

DEVICE = SimulatedDevice()
columns = st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**32 - 1]), max_size=12).map(
    lambda values: np.array(values, np.uint32)
)


def assert_same(found: Counts, expected: Counts) -> None:
    for name in ("values", "counts"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@settings(max_examples=100, deadline=None)
@given(st.lists(columns, min_size=1, max_size=3), st.data())
def test_counting(several: list[np.ndarray], data: st.DataObject) -> None:
    zeros = sum(int(np.count_nonzero(column == 0)) for column in several)
    placeholders = data.draw(st.integers(0, zeros))
    found = to_host(DEVICE, count_on_device(DEVICE, several, placeholders))
    assert_same(found, count(several, placeholders))


@settings(max_examples=100, deadline=None)
@given(st.lists(columns, min_size=1, max_size=5), st.integers(1, 2**40))
def test_merging(several: list[np.ndarray], times: int) -> None:
    counted = [count([column]) for column in several]
    counted = [Counts(counts.values, counts.counts * times) for counts in counted]
    there = [to_device(DEVICE, counts) for counts in counted]
    assert_same(to_host(DEVICE, merge_on_device(DEVICE, there)), merge(counted))


def test_a_vocabulary_that_is_not_counted() -> None:
    empty = count([np.empty(0, np.uint32)])
    assert_same(to_host(DEVICE, count_on_device(DEVICE, [], 0)), empty)
