"""``nvtabular.Workflow.load`` of a directory that this project saved."""

from __future__ import annotations

import nvt_torchrec.nvt_compat  # noqa: F401

# isort: split
import subprocess
import sys
from pathlib import Path

import fsspec
import nvtabular
import pandas as pd
import pytest
from nvtabular import ops

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.workflows.store import build, extract_fitted, load
from nvt_torchrec.workflows.writer import write_workflow
from tests.mutations import flip_bit

SPEC = FeatureSpec("label", (DenseColumn("x"),), (CategoricalColumn("c", raw="int"),))
FRAME = pd.DataFrame({"label": [0.0, 1.0], "x": [1.0, 2.0], "c": [8.0, 7.0]})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    workflow = build(SPEC, tmp_path / "fit")
    workflow.fit(nvtabular.Dataset(pd.concat([FRAME, FRAME[1:]]), cpu=True))
    write_workflow(tmp_path / "workflow", SPEC, extract_fitted(workflow, SPEC))
    return tmp_path / "workflow"


def test_it_is_the_fitted_workflow(saved: Path) -> None:
    expected = load(saved).transform(FRAME)
    for path in (saved, str(saved), saved.as_uri()):
        workflow = nvtabular.Workflow.load(path)
        assert isinstance(workflow, nvtabular.Workflow)
        pd.testing.assert_frame_equal(workflow.transform(FRAME), expected)
    assert expected["c"].tolist() == [4, 3]


def test_in_a_program_that_knows_nvtabular_only(saved: Path) -> None:
    code = "import sys, nvt_torchrec.workflows.store, nvtabular\n"
    code += "print(nvtabular.Workflow.load(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=False
    )
    assert "RawWorkflow object" in done.stdout, done.stderr


def test_its_files_are_checked(saved: Path) -> None:
    file = next(saved.rglob("unique.c.parquet"))
    flip_bit(file)
    with pytest.raises(BadInputError, match=r"unique.c.parquet: not the file that was written"):
        nvtabular.Workflow.load(saved)


def test_elsewhere_than_on_this_machine(saved: Path) -> None:
    fsspec.filesystem("memory").put(str(saved), "/remote", recursive=True)
    with pytest.raises(BadInputError, match="memory://remote: not a local directory"):
        nvtabular.Workflow.load("memory://remote")


def test_what_nvtabular_saved_is_loaded_as_ever(tmp_path: Path) -> None:
    workflow = nvtabular.Workflow(["x"] >> ops.FillMissing(5))
    workflow.fit(nvtabular.Dataset(FRAME[["x"]], cpu=True)).save(tmp_path / "theirs")
    loaded = nvtabular.Workflow.load(tmp_path / "theirs")
    assert loaded.transform(pd.DataFrame({"x": [None, 1.0]}))["x"].tolist() == [5, 1]
    with pytest.raises(FileNotFoundError):
        nvtabular.Workflow.load(tmp_path)


def test_without_nvt_compat_nvtabular_says_what_to_import(saved: Path) -> None:
    """Before it looks for the pickle, it tells the version that the workflow is from."""
    stock = nvtabular.Workflow.load.__wrapped__
    with (
        pytest.warns(UserWarning, match="import nvt_torchrec.workflows.store before nvtabular"),
        pytest.raises(FileNotFoundError, match=r"workflow\.pkl"),
    ):
        stock(nvtabular.Workflow, saved)
