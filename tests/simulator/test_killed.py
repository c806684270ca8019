"""The engine for GPUs goes on where it was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_killed_while_counting_and_encoding(tmp_path: Path) -> None:
    """Resumed, it writes the same bytes, and counts no block again whose counts were written."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulator.killed", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["killed"] == ["fit", "fit", "transform"]
    assert seen["different"] == []
    first, *others = seen["counted"]
    assert seen["blocks"] <= first <= 2 * seen["blocks"]  # killed while it counted the first ones
    assert others == [seen["blocks"]] * 2  # killed after that
