"""Clients take turns: whoever asks for much waits for himself, not others for him.

A client is an address (an IPv6 one stands for its /64, which one machine may own), or an API key.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import ipaddress
import itertools
from operator import itemgetter
from typing import Generic, TypeVar

T = TypeVar("T")
_MANY_CLIENTS = 1024


#: No address is longer; what a proxy passes on may be, and is not kept.
_LONGEST_ADDRESS = 64


def client_of(address: str) -> str:
    """The client that an address belongs to."""
    return address if len(address) > _LONGEST_ADDRESS else _client_of(address)


@functools.lru_cache(maxsize=4096)
def _client_of(address: str) -> str:
    try:
        value = ipaddress.ip_address(address)
    except ValueError:  # whatever a proxy says
        return address
    if value.version == 4:
        return address
    return str(value.ipv4_mapped or ipaddress.ip_network((value, 64), strict=False))


class FairQueue(Generic[T]):
    """Items in an order that gives each client the same share of the cost, in its own order.

    Start-time fair queueing (Goyal et al. 1996): an item begins where its client's last one ends,
    on a clock that shows where the item that was taken last began.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._ends: dict[str, float] = {}
        self._clock = 0.0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, item: T, client: str, cost: float) -> None:
        """Add an item at the end of its client's."""
        begin = max(self._clock, self._ends.get(client, 0.0))
        self._ends[client] = begin + cost
        heapq.heappush(self._heap, (begin, next(self._numbers), item))
        if len(self._ends) > _MANY_CLIENTS:  # only those matter that are far ahead of the others
            ahead = heapq.nlargest(_MANY_CLIENTS // 2, self._ends.items(), key=itemgetter(1))
            self._ends = dict(ahead)

    def first(self) -> T:
        """What :meth:`pop` would take."""
        return self._heap[0][2]

    def pop(self) -> T:
        """Take the next item. Raises IndexError if there is none."""
        self._clock, _, item = heapq.heappop(self._heap)
        if not self._heap:
            self._ends.clear()
            self._clock = 0.0
        return item

    def items(self) -> list[T]:
        """All of them, in no order."""
        return [item for _, _, item in self._heap]


class Turns:
    """Lets so many through at once, clients in turn. For one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def take(self, client: str, cost: float) -> None:
        """Wait for a turn; :meth:`give` ends it."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.put(turn, client, cost)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was this one's turn already
                self.give()
            raise

    def give(self) -> None:
        """End a turn: the next one's begins."""
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
