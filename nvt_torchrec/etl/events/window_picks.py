"""Numbers picked of the events of each key, as rows and events pass by in the order of time.

Without a window, a number for each key is enough. Within one, the events of a key that may still be
picked are a queue: each was not superseded by a later one, so the oldest is the one that counts,
and a new event first removes from the end all that it supersedes. Events that have left the window
are removed from the front once an event or a row of their key passes by. All queues are linked
lists of nodes in one pool, which grows as needed: most queues have a few nodes, and some many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.workflows.event_picks import pick, supersedes

#: Nodes of a pool at first.
_FIRST_NODES = 1 << 14
#: The index of no node.
_NONE = -1


class WindowPicks:
    """The numbers that are picked of all keys of a group; those of each key in the order of picks.

    Args:
        keys: How many keys there are.
        columns: Of each pick, the number of the column of amounts.
        kinds: Of each pick, its kind, see :data:`workflows.event_picks.PICK_KINDS`.
        window: How long an event counts, in microseconds; 0: always.

    Attributes:
        picked: float64 [keys, picks], without a window the numbers; NaN where there is none.
    """

    def __init__(
        self, keys: int, columns: Sequence[int], kinds: Sequence[int], window: int
    ) -> None:
        self._columns, self._kinds = np.array(columns, np.int64), np.array(kinds, np.int64)
        self._window = window
        self.picked = np.full((0 if window else keys, len(kinds)), np.nan)
        # the first and the last node of each queue
        self._ends = np.full((2, keys if window else 0, len(kinds)), _NONE, np.int32)
        # of each node its number, the time from when that is known, the nodes before and after it
        self._numbers, self._known = np.empty(0), np.empty(0, np.int64)
        self._links = np.empty((2, 0), np.int32)
        # the first of the nodes that are in no queue, which are linked as well, and how many
        self._free = np.array([_NONE, 0], np.int64)
        self.make_room()

    @property
    def count(self) -> int:
        """How many picks there are."""
        return len(self._kinds)

    @property
    def arrays(self) -> tuple:
        """What kernels take."""
        queues = self._ends, self._numbers, self._known, self._links, self._free
        return (self._columns, self._kinds, self._window, self.picked, *queues)

    def make_room(self) -> None:
        """Double the nodes, unless there are some for a further event."""
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
    """Return whether there are nodes for an event."""
    columns, free = picks[0], picks[8]
    return picks[2] == 0 or free[1] >= len(columns)


@compiled()
def add_to_picks(
    picks: tuple, key: int, amounts: np.ndarray, event: int, known: int, cut: int
) -> None:
    """Add an event to what is picked of its key.

    Args:
        picks: :attr:`WindowPicks.arrays`.
        key: Its key.
        amounts: float64 [amounts, events].
        event: Its index.
        known: From when it is known.
        cut: The time before which events count now.
    """
    columns, kinds, window, picked, ends, numbers, known_of_node, links, free = picks
    # What a new number supersedes can never be picked again, as it leaves the window earlier. So
    # the front of a queue is the pick, and each number is added and removed once.
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
        free[0], free[1] = links[1, node], free[1] - 1
        numbers[node], known_of_node[node] = amount, known
        links[0, node], links[1, node] = last, _NONE
        if last == _NONE:
            ends[0, key, p] = node
        else:
            links[1, last] = node
        ends[1, key, p] = node


@compiled()
def read_picks(picks: tuple, key: int, cut: int, row: int, found: np.ndarray) -> None:
    """Write what is picked of a key for a row to ``found``, float64 [picks, rows]."""
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
    """Put a node to those that are in no queue."""
    links[1, node] = free[0]
    free[0], free[1] = node, free[1] + 1
