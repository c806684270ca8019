"""docs/onnx.md's Node program, with ONNX Runtime's package of npm: no Python is in the way."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.predictor import Predictor

PAGE = Path(__file__).parents[2] / "docs" / "onnx.md"
#: Without the scripts that download more for GPUs.
INSTALL = "npm install onnxruntime-node@1.30.0 --ignore-scripts --no-audit --fetch-retries=0"


def test_the_program_of_the_documentation(
    bundle: Path, predictor: Predictor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("Node is not installed")
    command = INSTALL.split()
    installed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"npm cannot install onnxruntime-node: {installed.stderr[-200:]}")
    assert main(["export", "--bundle", str(bundle), "--output", str(tmp_path / "DIR")]) == 0
    (program,) = re.findall(r"```javascript\n(.*?)```", PAGE.read_text(), re.DOTALL)
    command = ["node", "-e", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    row = dict.fromkeys(predictor.spec.sources(label=False)) | {"int_0": 1, "cat_0": "68fd1e64"}
    assert float(done.stdout) == pytest.approx(float(predictor.predict([row])[0]), abs=1e-6)
    shutil.rmtree(tmp_path / "node_modules")  # pytest keeps temporary directories: 290 MB
