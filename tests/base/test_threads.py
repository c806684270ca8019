"""Work in threads: its results in order, few at a time, and what is raised."""

from __future__ import annotations

import threading

import pytest

from nvt_torchrec.base.threads import map_in_order


@pytest.mark.parametrize("threads", [1, 3])
def test_results_in_order_and_few_tasks_ahead(threads: int) -> None:
    first_may_end = threading.Event()
    taken = []

    def tasks():
        for i in range(50):
            taken.append(i)
            if i == threads + 2:  # as many as may be there while the first is under way
                first_may_end.set()
            yield i

    def work(i: int) -> int:
        if i == 0:
            assert first_may_end.wait(600)
        return i * i

    results = map_in_order(work, tasks(), threads, "test", ahead=2)
    assert next(results) == 0
    assert len(taken) == threads + 3
    assert list(results) == [i * i for i in range(1, 50)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_is_raised_and_ends_the_rest(error: type[BaseException]) -> None:
    """After Ctrl-C no thread goes on writing: in a notebook the same work may begin again."""
    done = []

    def work(i: int) -> int:
        if i == 3:
            raise error("three")
        done.append(i)
        return i

    results = map_in_order(work, range(1000), 2, "test")
    with pytest.raises(error, match="three"):
        list(results)
    assert len(done) < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]
