from __future__ import annotations

from pathlib import Path

from tests.forks import seen_by


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """The output is a whole generation or says that it is not; resumed, it is byte-identical."""
    seen = seen_by("tests.etl.killed_extend", tmp_path, 60)
    assert seen["wrong"] == []
    assert {"generation 0", "switch", "generation 1"} <= seen["kills"].keys()
    assert seen["kills"]["switch"] > 4  # threads decide at how many calls it is under way
    assert sum(seen["kills"].values()) > 14
    assert seen["undone"] > 6
