"""Draw items by a counter-based generator, so that a row gets the same items in every process."""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.hashing import join_hash, mix, splitmix64
from nvt_torchrec.base.kernels import compiled

#: Added to a counter for each draw (SplitMix64; Steele, Lea and Flood, 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
#: After so many rejected draws, the items are searched one by one: the user has nearly all of them,
#: or the others have tiny weights.
_MAX_DRAWS = 50
_UNIT = 2.0**-53


@compiled()
def _contains(ordered: np.ndarray, value: np.int64) -> bool:
    """Return whether an ascending array has a value."""
    begin = 0
    end = len(ordered)
    while begin < end:
        middle = (begin + end) // 2
        if ordered[middle] < value:
            begin = middle + 1
        else:
            end = middle
    return begin < len(ordered) and ordered[begin] == value


@compiled()
def _find_after(ordered: np.ndarray, end: int, value: float) -> int:
    """Return the index of the first of ``end`` ascending values that is greater than a value."""
    begin = 0
    while begin < end:
        middle = (begin + end) // 2
        if ordered[middle] <= value:
            begin = middle + 1
        else:
            end = middle
    return begin


@compiled()
def _may_take(
    index: int, user: int, item: int, pairs: np.ndarray, keys: np.ndarray, taken: np.ndarray
) -> bool:
    """Return whether a row may get an item: not its own, not drawn before, not its user's."""
    if keys[index] == item:
        return False
    for other in taken:
        if other == index:
            return False
    return not _contains(pairs, join_hash(user, keys[index]))


@compiled()
def draw_items(
    users: np.ndarray,
    items: np.ndarray,
    times: np.ndarray,
    limits: np.ndarray,
    seed: np.uint64,
    pairs: np.ndarray,
    keys: np.ndarray,
    weights: np.ndarray,
    chosen: np.ndarray,
) -> None:
    """Draw distinct items for each row, none of which is in a positive row of the row's user.

    Args:
        users: int64 [n], the hashes of the rows' users.
        items: int64 [n], the hashes of the rows' own items.
        times: int64 [n], the times of the rows, which tell rows with equal user and item apart.
        limits: int64 [n], the number of items that existed at the time of each row.
        seed: Another seed draws other items.
        pairs: int64 [pairs], ascending, the joined hashes of user and item of all positive rows.
        keys: int64 [m], the hashes of the items that can be drawn, in the order of their first
            times.
        weights: float64 [m], the cumulative weights of the items; [0] if all are equal.
        chosen: int64 [n, draws], the result: indices of items; -1 after the last item of a row if
            there are too few.
    """
    for i in range(len(users)):
        state = (
            mix(mix(mix(np.uint64(users[i])) + np.uint64(items[i])) + np.uint64(times[i])) + seed
        )
        limit = limits[i]
        chosen[i] = -1
        for j in range(chosen.shape[1] if limit else 0):
            index = 0
            found = False
            for _ in range(_MAX_DRAWS):
                state += _STEP
                unit = np.float64(splitmix64(state) >> np.uint64(11)) * _UNIT
                if len(weights):
                    index = _find_after(weights, limit, unit * weights[limit - 1])
                else:
                    index = int(unit * limit)
                index = min(index, limit - 1)  # the product may be rounded up
                found = _may_take(index, users[i], items[i], pairs, keys, chosen[i, :j])
                if found:
                    break
            first = index
            while not found:
                index = index + 1 if index + 1 < limit else 0
                if index == first:
                    break
                found = _may_take(index, users[i], items[i], pairs, keys, chosen[i, :j])
            if not found:
                break
            chosen[i, j] = index
