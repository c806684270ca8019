"""Run tasks in threads, with results in the order of the tasks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class MapTasks(Protocol):
    """Runs a function for each task, in threads or in other processes."""

    def __call__(
        self, work: Callable[[_Task], _Result], tasks: Iterable[_Task]
    ) -> Iterator[_Result]:
        """Yield the results in the order of the tasks.

        Args:
            work: Called with each task. It may be pickled and sent to other processes, and called
                again for a task whose process has died. If it raises, the error is raised here,
                and tasks that have not begun are dropped.
            tasks: Small objects that can be pickled, as the results must be.
        """


def run_each(map_tasks: MapTasks, work: Callable[[_Task], object], tasks: Iterable[_Task]) -> None:
    """Run a function for each task, and wait for all; the results are dropped."""
    for _ in map_tasks(work, tasks):
        pass


def count_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def map_in_order(
    work: Callable[[_Task], _Result],
    tasks: Iterable[_Task],
    threads: int,
    name: str,
    ahead: int = 1,
) -> Iterator[_Result]:
    """Yield the results in the order of the tasks; only a few tasks and results are held at a time.

    Args:
        work: Called in a thread with each task. If it raises, the error is raised here. Then, and
            after Ctrl-C, tasks that have not begun are dropped, and running ones are waited for.
        tasks: The tasks; they are taken one by one, as threads become free.
        threads: The number of threads.
        name: The prefix of the threads' names.
        ahead: How many more tasks than threads may be running, or finished but not yet yielded.
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
