from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("by", "stride", "kills"), [("days", 20, 50), ("share", 40, 35)])
def test_killed_at_any_moment(tmp_path: Path, by: str, stride: int, kills: int) -> None:
    """The output is a whole generation or says that it is not; resumed, it is byte-identical."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.etl.killed_extend", str(tmp_path), str(stride), by],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["wrong"] == []
    assert {"generation 0", "switch", "generation 1"} <= seen["kills"].keys()
    assert seen["kills"]["switch"] > 20
    assert sum(seen["kills"].values()) > kills
