"""The newest, smallest or largest value among the events of each key, updated in time order.

Without a window, one value for each key is enough. With a window, each key has a queue of the
events that may still be picked. No event in it is superseded by a later one, so the oldest is the
current pick. A new event first removes from the end all events that it supersedes. Events that have
left the window are removed from the front when the next event or row of their key is processed. All
queues are linked lists of nodes in one pool that grows as needed, because most queues have a few
nodes, and some have many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.workflows.event_picks import pick, supersedes

#: The initial number of nodes of a pool.
_FIRST_NODES = 1 << 14
#: The index of no node.
_NONE = -1


class WindowPicks:
    """The picked values of all keys of a group.

    Args:
        keys: Number of keys.
        columns: For each pick, the index of its column of amounts.
        kinds: For each pick, its kind, see :data:`workflows.event_picks.PICK_KINDS`.
        window: How long an event counts, in microseconds; 0: always.

    Attributes:
        picked: float64 [keys, picks], the current picks if there is no window; NaN without a value.
            With a window, [0, picks].
    """

    def __init__(
        self, keys: int, columns: Sequence[int], kinds: Sequence[int], window: int
    ) -> None:
        self._columns = np.array(columns, np.int64)
        self._kinds = np.array(kinds, np.int64)
        self._window = window
        self.picked = np.full((0 if window else keys, len(kinds)), np.nan)
        # The first and the last node of each queue.
        self._ends = np.full((2, keys if window else 0, len(kinds)), _NONE, np.int32)
        # For each node, its value, the time from which it is known, its previous and next node.
        self._numbers = np.empty(0)
        self._known = np.empty(0, np.int64)
        self._links = np.empty((2, 0), np.int32)
        # The first free node, from which the other free nodes are linked, and their number.
        self._free = np.array([_NONE, 0], np.int64)
        self.make_room()

    @property
    def count(self) -> int:
        """The number of picks."""
        return len(self._kinds)

    @property
    def arrays(self) -> tuple:
        """The arrays, as one argument for kernels."""
        queues = self._ends, self._numbers, self._known, self._links, self._free
        return (self._columns, self._kinds, self._window, self.picked, *queues)

    def make_room(self) -> None:
        """Double the number of nodes, unless enough are free for another event."""
        if not self._window or self._free[1] >= self.count:
            return
        old = len(self._numbers)
        new = max(_FIRST_NODES, 2 * old, len(self._kinds))
        self._numbers = np.resize(self._numbers, new)
        self._known = np.resize(self._known, new)
        links = np.full((2, new), _NONE, np.int32)
        links[:, :old] = self._links
        links[1, old : new - 1] = np.arange(old + 1, new)
        links[1, new - 1] = self._free[0]
        self._links = links
        self._free[:] = old, self._free[1] + new - old


@compiled()
def has_room(picks: tuple) -> bool:
    """Return whether enough nodes are free for another event."""
    # By index, as unpacking all arrays would update the reference count of each.
    columns = picks[0]
    window = picks[2]
    free = picks[8]
    return window == 0 or free[1] >= len(columns)


@compiled()
def add_to_picks(
    picks: tuple, key: int, amounts: np.ndarray, event: int, known: int, cut: int
) -> None:
    """Add an event to the picks of its key.

    Args:
        picks: :attr:`WindowPicks.arrays`.
        key: The number of its key.
        amounts: float64 [amounts, events].
        event: The index of the event.
        known: The time from which it is known.
        cut: The time before which events count for the current row.
    """
    columns, kinds, window, picked, ends, numbers, known_of_node, links, free = picks
    # A value that a new one supersedes can never be picked again, because it leaves the window
    # earlier. So each value is added and removed only once, and the front of the queue is the pick.
    for p in range(len(columns)):
        amount = amounts[columns[p], event]
        if math.isnan(amount):
            continue
        if window == 0:
            picked[key, p] = pick(kinds[p], amount, picked[key, p])
            continue
        _drop_old(picks, key, p, cut)
        last = ends[1, key, p]
        while last != _NONE and supersedes(kinds[p], amount, numbers[last]):
            previous = links[0, last]
            _release(links, free, last)
            last = previous
        node = free[0]
        free[0] = links[1, node]
        free[1] -= 1
        numbers[node] = amount
        known_of_node[node] = known
        links[0, node] = last
        links[1, node] = _NONE
        if last == _NONE:
            ends[0, key, p] = node
        else:
            links[1, last] = node
        ends[1, key, p] = node


@compiled()
def read_picks(picks: tuple, key: int, cut: int, row: int, found: np.ndarray) -> None:
    """Write the picks of a key for a row to ``found``, float64 [picks, rows]."""
    columns, _, window, picked, ends, numbers, _, _, _ = picks
    for p in range(len(columns)):
        if window == 0:
            found[p, row] = picked[key, p]
            continue
        _drop_old(picks, key, p, cut)
        first = ends[0, key, p]
        found[p, row] = np.nan if first == _NONE else numbers[first]


@compiled()
def _drop_old(picks: tuple, key: int, p: int, cut: int) -> None:
    """Remove the nodes of a queue that have left the window."""
    _, _, window, _, ends, _, known, links, free = picks
    first = ends[0, key, p]
    while first != _NONE and known[first] < cut - window:
        following = links[1, first]
        _release(links, free, first)
        first = following
    ends[0, key, p] = first
    if first == _NONE:
        ends[1, key, p] = _NONE
    else:
        links[0, first] = _NONE


@compiled()
def _release(links: np.ndarray, free: np.ndarray, node: int) -> None:
    """Add a node to the free nodes."""
    links[1, node] = free[0]
    free[0] = node
    free[1] += 1
