"""The cpu engine in a process of its own: how much memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.logs import random_rows

_SCRIPT = """
import json, resource, sys
from pathlib import Path
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.formats.spec.toml_file import load_spec
from nvt_torchrec.etl.engines.engine import Job
from nvt_torchrec.etl.engines.threads import Threads
from nvt_torchrec.etl.plan import make_plan
from nvt_torchrec.workflows.writer import write_workflow

raw, out, block_bytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
plan = make_plan(find_days(raw), load_spec(), block_bytes=block_bytes)
engine = Threads(Job(load_spec(), out, workers=2))
fitted = engine.fit(plan.train_blocks, lambda rows: None)
write_workflow(out / "workflow", load_spec(), fitted)
for _ in engine.encode(plan.units, out / "workflow"):
    pass
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(json.dumps([len(plan.units), peak_mb]))
"""


def _run(raw: Path, out: Path, block_bytes: int) -> list:
    """Return the number of units, and the peak in MiB."""
    command = [sys.executable, "-c", _SCRIPT, str(raw), str(out), str(block_bytes)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Logs of about 3 and 40 blocks: the same vocabulary, about the same peak."""
    rows = random_rows(4000, 0)
    text = "".join("\t".join(row) + "\n" for row in rows)
    peaks = {}
    for name, times in (("small", 10), ("large", 190)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "day_0", "w") as file:
            for _ in range(times):
                file.write(text)
        (tmp_path / name / "day_1").write_text(text)
        peaks[name] = _run(tmp_path / name, tmp_path / f"{name}.o", 4 << 20)
    (small_units, small_mb), (large_units, large_mb) = peaks["small"], peaks["large"]
    assert small_units <= 6
    assert large_units >= 40
    assert large_mb < small_mb + 40, peaks
