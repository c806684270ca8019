"""The engine for GPUs goes on where it was killed."""

from __future__ import annotations

from pathlib import Path

from tests.forks import seen_by


def test_killed_while_counting_and_encoding(tmp_path: Path) -> None:
    """Resumed, it writes the same bytes, and counts no block again whose counts were written."""
    seen = seen_by("tests.simulator.killed", tmp_path)
    assert seen["killed"] == ["fit", "fit", "transform"]
    assert seen["different"] == []
    first, *others = seen["counted"]
    assert seen["blocks"] <= first <= 2 * seen["blocks"]  # killed while it counted the first ones
    assert others == [seen["blocks"]] * 2  # killed after that
