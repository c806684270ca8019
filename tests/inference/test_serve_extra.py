"""What the extra ``[serve]`` installs is enough to make a bundle of a checkpoint, and to score."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from tests.inference.conftest import Trained
from tests.inference.test_export import linked, run_isolated
from tests.test_wheel import ROOT, with_extras

_PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.__main__ import main
import nvt_torchrec.inference.server.app  # and all that it imports
import nvt_torchrec.inference.server.processes
status = main({bundle!r}) or main({predict!r})
if not status:
    predictor = Predictor.load({predict!r}[2])
    row = dict.fromkeys(predictor.spec.columns)
    assert len(predictor.predict([row] * 20)) == 20
    assert len(predictor.predict({{name: [None, None] for name in row}})) == 2
print([name for name in ("torchrec", "nvtabular", "pandas", "dask") if name in sys.modules])
sys.exit(status)
"""


def test_the_serve_extra_is_enough(trained: Trained, tmp_path: Path) -> None:
    """Without TorchRec, FBGEMM, NVTabular and Dask."""
    packages, project = tmp_path / "packages", tmp_path / "project"
    packages.mkdir()
    project.mkdir()
    linked_names = linked(packages, *with_extras("serve"))
    assert not linked_names & {"torchrec", "fbgemm-gpu-cpu", "nvtabular", "pandas", "dask"}
    (project / "nvt_torchrec").symlink_to(ROOT / "nvt_torchrec")
    made, output = str(tmp_path / "bundle"), tmp_path / "scores.parquet"
    bundle = ["bundle", *trained.flags, "--output", made]
    predict = ["predict", "--bundle", made, "--output", str(output)]
    predict += ["--input", str(trained.raw / "day_2")]
    paths = [str(project), str(packages)]
    program = _PROGRAM.format(paths=paths, bundle=bundle, predict=predict)
    done = run_isolated(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert pq.read_metadata(output).num_rows == len(trained.days[2])
