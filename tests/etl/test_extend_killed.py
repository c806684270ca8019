from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import seen_by


@pytest.mark.parametrize(("by", "stride", "kills"), [("days", 40, 20), ("share", 80, 12)])
def test_killed_at_any_moment(tmp_path: Path, by: str, stride: int, kills: int) -> None:
    """The output is a whole generation or says that it is not; resumed, it is byte-identical."""
    seen = seen_by("tests.etl.killed_extend", tmp_path, stride, by)
    assert seen["wrong"] == []
    assert {"generation 0", "switch", "generation 1"} <= seen["kills"].keys()
    assert seen["kills"]["switch"] > 4  # threads decide at how many calls it is under way
    assert sum(seen["kills"].values()) > kills
    assert by == "share" or seen["undone"] > 10
