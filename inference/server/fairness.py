"""Fair queueing: a client that sends much work delays itself, not others.

A client is an IPv4 address, the /64 network of an IPv6 address (one machine may own all of it), or
an API key.
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
_MAX_CLIENTS = 1024
#: No address is longer. A proxy may pass on longer texts, which are not cached.
_MAX_ADDRESS_LENGTH = 64


def client_of(address: str) -> str:
    """Return the client that an address belongs to."""
    return address if len(address) > _MAX_ADDRESS_LENGTH else _client_of(address)


@functools.lru_cache(maxsize=4096)
def _client_of(address: str) -> str:
    try:
        value = ipaddress.ip_address(address)
    except ValueError:  # any text that a proxy passes on
        return address
    if value.version == 4:
        return address
    return str(value.ipv4_mapped or ipaddress.ip_network((value, 64), strict=False))


class FairQueue(Generic[T]):
    """A queue that gives each client the same share of the cost, and keeps each client's order.

    Start-time fair queueing (Goyal et al. 1996): an item starts where its client's last item ends,
    but not before the virtual time, which is the start of the item that was taken last.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._ends: dict[str, float] = {}
        self._virtual_time = 0.0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, item: T, client: str, cost: float) -> None:
        """Add an item after the other items of its client."""
        begin = max(self._virtual_time, self._ends.get(client, 0.0))
        self._ends[client] = begin + cost
        heapq.heappush(self._heap, (begin, next(self._numbers), item))
        if len(self._ends) > _MAX_CLIENTS:  # keep those that are furthest ahead
            ahead = heapq.nlargest(_MAX_CLIENTS // 2, self._ends.items(), key=itemgetter(1))
            self._ends = dict(ahead)

    def first(self) -> T:
        """Return the item that :meth:`pop` would take."""
        return self._heap[0][2]

    def pop(self) -> T:
        """Remove and return the next item. Raises IndexError if there is none."""
        self._virtual_time, _, item = heapq.heappop(self._heap)
        if not self._heap:
            self._ends.clear()
            self._virtual_time = 0.0
        return item

    def items(self) -> list[T]:
        """Return all items, in any order."""
        return [item for _, _, item in self._heap]


class Turns:
    """A semaphore for one event loop that serves waiting clients in turn.

    Args:
        count: How many may hold it at once.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def acquire(self, client: str, cost: float) -> None:
        """Wait for a turn; :meth:`release` ends it."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.put(turn, client, cost)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn had begun
                self.release()
            raise

    def release(self) -> None:
        """End a turn, and begin the next one's."""
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
