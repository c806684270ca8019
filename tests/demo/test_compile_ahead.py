"""What was compiled ahead is not compiled again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from demo import compile_ahead

ROOT = Path(__file__).parents[2]
_RUN = """
import sys
from pathlib import Path
from nvt_torchrec.base.kernels import compile_seconds
from nvt_torchrec.etl.__main__ import main
from tests.spec_logs import write_spec_log
from nvt_torchrec.formats.feature_spec.toml_file import load_spec

raw, out = sys.argv[1:]
write_spec_log(Path(raw), load_spec("retail"), rows=100, seed=5)
(day,) = Path(raw).glob("day_1*")
with open(day, "r+") as file:  # no newline at its end
    file.truncate(file.seek(0, 2) - 1)
main(["run", "--input_path", raw, "--output_path", out, "--spec", "retail", "--engine", "cpu"])
print(compile_seconds())
"""


def test_the_first_run_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CSV; TSV and the loader go the same way, and would take as long again."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_ahead, "IMPORTS", compile_ahead.IMPORTS[:1])
    monkeypatch.setattr(compile_ahead, "SPECS", ("retail",))
    assert compile_ahead.main() == 0
    command = [sys.executable, "-c", _RUN, str(tmp_path / "raw"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert (tmp_path / "out" / "manifest.json").exists(), done.stderr
    assert float(done.stdout.splitlines()[-1]) == 0, done.stderr
    assert "compiling" not in done.stderr


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(compile_ahead, "IMPORTS", [("no_such_module_of_ours",)])
    monkeypatch.setattr(compile_ahead, "SPECS", ())
    assert compile_ahead.main() == 2
    assert "No module named 'no_such_module_of_ours'" in capsys.readouterr().err
