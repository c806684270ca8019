"""What the extra ``[serve]`` installs is enough to score with a bundle."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from tests.inference.test_export import linked, run_isolated, untrained
from tests.logs import write_log
from tests.test_wheel import ROOT, with_extras

_PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.__main__ import main
import nvt_torchrec.inference.server.app  # and all that it imports
import nvt_torchrec.inference.server.run
status = main({arguments!r})
if not status:
    predictor = Predictor.load({arguments!r}[2])
    row = dict.fromkeys(predictor.spec.columns)
    assert len(predictor.predict([row] * 20)) == 20
    assert len(predictor.predict({{name: [None, None] for name in row}})) == 2
print([name for name in ("torchrec", "nvtabular", "pandas", "dask") if name in sys.modules])
sys.exit(status)
"""


def test_a_bundle_needs_the_serve_extra_alone(tmp_path: Path) -> None:
    """Without TorchRec, FBGEMM, NVTabular and Dask. With a checkpoint, the error names TorchRec."""
    untrained(tmp_path, load_spec(), seed=1)
    write_log(tmp_path / "raw", [50], seed=2)
    packages, project = tmp_path / "packages", tmp_path / "project"
    packages.mkdir()
    project.mkdir()
    linked_names = linked(packages, *with_extras("serve"))
    assert not linked_names & {"torchrec", "fbgemm-gpu-cpu", "nvtabular", "pandas", "dask"}
    (project / "nvt_torchrec").symlink_to(ROOT / "nvt_torchrec")
    output = tmp_path / "scores.parquet"
    arguments = ["predict", "--bundle", str(tmp_path / "bundle"), "--output", str(output)]
    arguments += ["--input", str(tmp_path / "raw" / "day_0")]
    paths = [str(project), str(packages)]
    done = run_isolated(_PROGRAM.format(paths=paths, arguments=arguments), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert pq.read_metadata(output).num_rows == 50
    arguments[1:3] = ["--workflow", str(tmp_path / "workflow"), "--checkpoint", str(tmp_path)]
    done = run_isolated(_PROGRAM.format(paths=paths, arguments=arguments), tmp_path)
    assert done.returncode != 0
    assert "no torchrec; supported: torch 2.13" in done.stderr
