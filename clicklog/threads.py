"""Work in threads, its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def in_order(
    work: Callable[[_Task], _Result],
    tasks: Iterable[_Task],
    threads: int,
    name: str,
    ahead: int = 1,
) -> Iterator[_Result]:
    """Results in the order of the tasks, of which only a few are there at any time.

    Args:
        work: done in a thread; what it raises is raised here, and what has not begun is dropped.
        tasks: taken one by one, as there is room.
        threads: how many.
        name: that the threads' names begin with.
        ahead: how many tasks more than threads may be under way, or done and waiting.
    """
    pool = ThreadPoolExecutor(threads, name)
    pending: deque[Future[_Result]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(work, task))
            if len(pending) > threads + ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
