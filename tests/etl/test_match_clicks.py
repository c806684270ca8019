"""To which row a click belongs: compiled loops beside a search of all rows for each click."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.etl.labels.click_files import ClickLog
from nvt_torchrec.etl.labels.click_kernels import choose_shift, find_clicked, index_keys
from nvt_torchrec.etl.labels.match_clicks import (
    Matches,
    count_newest,
    join_newest,
)
from nvt_torchrec.formats.feature_spec.spec_variants import keep_label_keys_only
from nvt_torchrec.formats.rows import NO_TIME
from tests.etl.killed import spec_of_few


def draw(random: np.random.Generator, count: int, num_keys: int, end: int) -> tuple:
    """Return keys, some of them 0 for none, at both ends of their range; and times."""
    keys = random.integers(-(2**63), 2**63 - 1, num_keys)
    keys[:2] = [-(2**63), 2**63 - 1][:num_keys]
    keys = np.append(keys, 0)
    return keys, random.integers(0, end, count)


@pytest.mark.parametrize("seed", range(60))
def test_clicks_belong_to_the_newest_row_that_is_not_after_them(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_rows, num_clicks = (int(n) for n in random.integers(0, 300, 2))
    window, end = int(random.choice([1, 5, 50, 10**6])), int(random.choice([8, 60, 10**5]))
    every_key, times = draw(random, num_rows, int(random.integers(1, 40)), end)
    keys = random.choice(every_key, num_rows)
    click_keys = random.choice(every_key[:-1], num_clicks)
    click_times = random.integers(-5, end + 20, num_clicks)
    clicks = ClickLog.join(click_keys, click_times, np.zeros(num_clicks, np.bool_))
    assert len(clicks) == len({*zip(click_keys.tolist(), click_times.tolist(), strict=True)})
    matches = Matches(clicks, window)
    order = random.permutation(num_rows) if seed % 2 else np.argsort(times)
    for piece in np.array_split(order, 4):
        matches.add(keys[piece], times[piece])
    clicked: set[tuple[int, int]] = set()
    for i, (key, time) in enumerate(zip(clicks.keys, clicks.times, strict=True)):
        before = times[(keys == key) & (times <= time)]
        newest = int(before.max(initial=NO_TIME))
        if newest < time - window:
            newest = NO_TIME
        assert matches.row_times[i] == newest
        if newest != NO_TIME:
            clicked.add((int(key), newest))
    assert matches.count_known() == np.isin(clicks.keys, keys).sum()
    pairs = np.array(sorted(clicked), np.int64).reshape(-1, 2).T.copy()
    begins, found = index_keys(pairs[0]), np.full(num_rows, 7, np.uint8)
    find_clicked(pairs[0], pairs[1], begins, choose_shift(begins), keys, times, found)
    rows = zip(keys.tolist(), times.tolist(), strict=True)
    assert found.tolist() == [row in clicked for row in rows]


def test_a_key_of_many_rows_and_clicks_takes_no_product_of_them() -> None:
    """A program that clicks all day long: 1e10 steps would take minutes."""
    times = np.arange(0, 2_000_000, 20)
    clicks = ClickLog.join(np.ones(100_000, np.int64), times + 5, np.zeros(100_000, np.bool_))
    matches = Matches(clicks, 10**9)
    for piece in np.array_split(times, 8):
        matches.add(np.ones(len(piece), np.int64), piece)
    np.testing.assert_array_equal(matches.row_times, times)


def test_newest_times_of_hours() -> None:
    hour = 3_600_000_000
    counted = count_newest(np.array([hour + 5, 3, hour + 9, 1]))
    assert counted.tolist() == [[0, 1], [2, 2], [3, hour + 9]]
    assert join_newest([counted, counted]).tolist() == [[0, 1], [4, 4], [3, hour + 9]]
    assert count_newest(np.empty(0, np.int64)).shape == (3, 0)


def test_keys_of_a_spec_with_every_kind_of_file(tmp_path: Path) -> None:
    """It is a spec as well: what needs a column that is not read, such as a source, is left out."""
    keys = keep_label_keys_only(spec_of_few(tmp_path))
    assert keys.label_files
    assert not keys.event_sources
    assert not keys.joined_tables
