"""The planning functions, over random layouts and world sizes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.nvt_loader.parquet.decoder import choose_rows
from nvt_torchrec.nvt_loader.plan import (
    Plan,
    Span,
    assign_rows,
    choose_virtual_shards,
    find_remainder,
    find_stream_starts,
)

layouts = st.lists(st.integers(0, 40), max_size=12)


def starts_of(groups: list[int]) -> np.ndarray:
    return find_stream_starts(np.array(groups, dtype=np.int64), np.arange(len(groups)))


def global_batches(
    plan: Plan, world_size: int, groups: list[int] | None = None, at: int | None = None
) -> list[list[list[int]]]:
    """Stream rows [step][rank][row], from what each rank would read."""
    assigned = assign_rows(plan, starts_of([plan.rows] if groups is None else groups), at)

    def take(span: Span, step: int) -> list[int]:
        ranges = assigned.list_shard_ranges(span.shard, step * span.width)
        return list(itertools.chain(*(range(*ends) for ends in ranges)))[: span.width]

    steps = []
    for step in range(plan.full_steps):
        ranks = []
        for rank in range(world_size):
            rows = []
            for span in plan.list_spans(rank, world_size):
                rows += take(span, step)[span.begin : span.end]
            ranks.append(rows)
        steps.append(ranks)
    if plan.last_rows:
        left = range(*assigned.remainder)
        steps.append(
            [
                list(left[slice(*plan.find_last_rows(rank, world_size))])
                for rank in range(world_size)
            ]
        )
    return steps


@given(
    rows=st.integers(0, 500),
    world_size=st.integers(1, 64),
    batch_size=st.integers(1, 9),
    choose=st.integers(0, 50),
    drop_last=st.booleans(),
)
def test_every_row_once_and_equal_steps(rows, world_size, batch_size, choose, drop_last):
    global_batch = batch_size * world_size
    shards = [*range(1, global_batch + 1), choose_virtual_shards(global_batch)]
    plan = Plan(rows, global_batch, shards[choose % len(shards)], drop_last)
    steps = global_batches(plan, world_size)
    assert len(steps) == plan.steps
    assert plan.steps == (rows // global_batch if drop_last else math.ceil(rows / global_batch))
    assigned = [row for ranks in steps for batch in ranks for row in batch]
    assert sorted(assigned) == list(
        range(rows // global_batch * global_batch if drop_last else rows)
    )
    assert plan.epoch_rows == len(assigned)
    for rank in range(world_size):
        sizes = [len(ranks[rank]) for ranks in steps]
        for first in (0, 1, plan.full_steps, plan.steps):
            assert plan.count_rank_rows(rank, world_size, first, plan.steps) == sum(sizes[first:])
    for ranks in steps[: plan.full_steps]:
        assert {len(batch) for batch in ranks} == {batch_size}
    for ranks in steps[plan.full_steps :]:
        sizes = [len(batch) for batch in ranks]
        assert max(sizes) - min(sizes) <= 1


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@settings(max_examples=60, deadline=None)
@given(
    global_batch=st.one_of(st.sampled_from([6, 7, 12, 100, 300]), st.integers(1, 64)),
    steps=st.integers(0, 3),
    groups=layouts,
    data=st.data(),
)
def test_global_batches_do_not_depend_on_the_world_size(global_batch, steps, groups, data):
    """For every world size that divides the global batch, whatever the files."""
    rest = data.draw(st.integers(0, global_batch - 1))
    groups = [*groups, max(0, steps * global_batch + rest - sum(groups))]
    plan = Plan(sum(groups), global_batch, choose_virtual_shards(global_batch))
    at = data.draw(st.integers(0, plan.rows - plan.remainder_rows))
    alone = [step[0] for step in global_batches(plan, 1, groups, at)]
    for world_size in divisors(global_batch):
        ranks = global_batches(plan, world_size, groups, at)
        assert [list(itertools.chain(*step)) for step in ranks] == alone


@settings(max_examples=200, deadline=None)
@given(groups=layouts, more=st.integers(0, 20), shards=st.integers(1, 9), data=st.data())
def test_every_row_is_dealt_once_wherever_the_rest_lies(groups, more, shards, data):
    plan = Plan(sum(groups), shards + more, shards)
    at = data.draw(st.integers(0, plan.rows - plan.remainder_rows))
    assigned = assign_rows(plan, starts_of(groups), at)
    sizes = [plan.full_steps * (b - a) for a, b in itertools.pairwise(plan.bounds)]
    assert [sum(end - begin for begin, end in ranges) for ranges in assigned.shards] == sizes
    assert all(begin < end for ranges in assigned.shards for begin, end in ranges)
    rows = [row for ranges in assigned.shards for ends in ranges for row in range(*ends)]
    assert assigned.remainder == (at, at + plan.remainder_rows)
    assert sorted([*rows, *range(*assigned.remainder)]) == list(range(plan.rows))
    for shard in range(shards):
        whole = list(itertools.chain(*(range(*ends) for ends in assigned.shards[shard])))
        begin = data.draw(st.integers(0, sizes[shard]))
        rest = itertools.chain(*(range(*ends) for ends in assigned.list_shard_ranges(shard, begin)))
        assert list(rest) == whole[begin:]


@given(rows=st.integers(0, 200), batch=st.integers(1, 30), seed=st.integers(0, 9))
def test_drop_last_leaves_out_other_rows_in_each_epoch(rows, batch, seed):
    plan = Plan(rows, batch, 1, drop_last=True)
    for shuffle in (False, True):
        at = [find_remainder(plan, shuffle=shuffle, seed=seed, epoch=epoch) for epoch in range(30)]
        assert all(0 <= first <= rows - plan.remainder_rows for first in at)
        if plan.remainder_rows and plan.full_steps:
            if shuffle:
                assert len(set(at)) > 1
            else:
                assert all(a != b for a, b in itertools.pairwise(at))
        else:
            assert len(set(at)) == 1
    without = Plan(rows, batch, 1)
    assert (
        find_remainder(without, shuffle=True, seed=seed, epoch=5) == rows - without.remainder_rows
    )


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_a_sample_of_the_rows(rate):
    kept = choose_rows(100_000, rate, seed=1, row_group=3)
    assert abs(kept.mean() - rate) < 0.01
    assert (kept == choose_rows(100_000, rate, seed=1, row_group=3)).all()
    if 0 < rate < 1:
        assert (kept != choose_rows(100_000, rate, seed=1, row_group=4)).any()
        assert (kept != choose_rows(100_000, rate, seed=2, row_group=3)).any()
    # a run that was begun before an upgrade of this project keeps its rows
    half = np.flatnonzero(choose_rows(16, 0.5, seed=0, row_group=1))
    assert half.tolist() == [0, 2, 3, 4, 6, 11, 12, 15]
