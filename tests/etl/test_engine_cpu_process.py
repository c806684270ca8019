"""A run with the cpu engine in a process of its own: how much memory it takes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.logs import random_rows, text_of
from tests.shell import python

_SCRIPT = """
import json, resource, sys
from pathlib import Path
from nvt_torchrec.etl.engines import kept_rows
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.feature_spec.toml_file import load_spec

kept_rows.MAX_BYTES = 4 << 20  # less than either log has
options = {"engine": "cpu", "workers": 2, "block_mb": 4}
manifest = run(EtlSettings(sys.argv[1], Path(sys.argv[2]), load_spec(), **options))
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(json.dumps([len(manifest["files"]), peak_mb]))
"""


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Logs of about 3 and 40 blocks: the same vocabulary, about the same peak."""
    text = text_of(random_rows(4000, 0))
    peaks = {}
    for name, times in (("small", 10), ("large", 190)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "day_0", "w") as file:
            for _ in range(times):
                file.write(text)
        (tmp_path / name / "day_1").write_text(text)
        done = python("-c", _SCRIPT, tmp_path / name, tmp_path / f"{name}.o")
        peaks[name] = json.loads(done.stdout)
    (small_parts, small_mb), (large_parts, large_mb) = peaks["small"], peaks["large"]
    assert small_parts <= 6
    assert large_parts >= 40
    assert large_mb < small_mb + 40, peaks
