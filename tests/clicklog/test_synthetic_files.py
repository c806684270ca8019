"""What the synthetic log does to a directory and to processes, and its command line."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.clicklog.synthetic.log import synthesize
from nvt_torchrec.clicklog.synthetic.model import SyntheticSettings
from tests.clicklog.directories import contents

SETTINGS = SyntheticSettings(days=3, rows_per_day=500, seed=5)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synthetic") / "raw"
    synthesize(directory, SETTINGS, workers=2)
    return directory


def test_a_log_is_not_overwritten(log: Path) -> None:
    before = contents(log)
    with pytest.raises(OutputError, match="raw exists"):
        synthesize(log, SETTINGS)
    assert contents(log) == before


FULL_DISK = """
import resource, sys
from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.clicklog.synthetic.log import synthesize
from nvt_torchrec.clicklog.synthetic.model import SyntheticSettings
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    synthesize(sys.argv[1], SyntheticSettings(days=2, rows_per_day=8192), workers=2)
except OutputError as error:
    print(error)
"""


def test_a_failed_write_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "raw")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"raw: cannot be written: File too large\n  -> free space", done.stdout)
    assert not os.listdir(tmp_path)


# ---- settings and command line


def test_command_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd) -> None:
    from nvt_torchrec.etl.__main__ import main

    line = (
        f"synthesize --output_path {tmp_path}/raw --days 2 --rows_per_day 40 --seed 9 "
        "--cardinality_scale 0.01 --base_rate 0.3 --workers 1"
    )
    with caplog.at_level(logging.INFO):
        assert main(line.split()) == 0
    synthesize(tmp_path / "again", SyntheticSettings(2, 40, 9, 0.01, 0.3))
    assert contents(tmp_path / "raw") == contents(tmp_path / "again")
    assert "2 days, 80 rows" in caplog.text
    assert "oracle AUROC test" in caplog.text
    assert "\r" not in capfd.readouterr().err  # no progress bar in a log
    assert main(["synthesize", "--output_path", "raw", "--spec", "retail"]) == 2
    assert "rows of your own log" in capfd.readouterr().err


def test_the_ground_floor_knows_no_framework() -> None:
    code = "import nvt_torchrec.clicklog.synthetic.log, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "nvt_torchrec" in loaded
    assert not loaded & {"torch", "dask", "nvtabular", "merlin", "pandas", "numba", "sklearn"}
