"""Work in threads: its results in order, few at a time, and what is raised."""

from __future__ import annotations

import threading

import pytest

from nvt_torchrec.base.threads import map_in_order


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
