from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import nvtabular
import pandas as pd
import pytest

from nvt_torchrec import workflows
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.text.line_layout import plain_layout
from nvt_torchrec.clicklog.text.tokenizer import parse_rows
from nvt_torchrec.formats.spec.columns import DENSE_TRANSFORMS
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.workflows.store import build, load, save
from tests.logs import CRITEO, Reference, random_rows

TRAIN, TEST = random_rows(300, 1), random_rows(80, 2)
# unseen values and a row with nothing in it
TEST[0] = ["0", *["-5"] * 13, *["ffffffff"] * 26]
TEST[1] = ["1", *[""] * 39]


def frame_of(rows: list[list[str]], spec: FeatureSpec = CRITEO) -> pd.DataFrame:
    label = len(rows[0]) == len(spec.columns)
    text = "\n".join("\t".join(row) for row in rows).encode()
    return workflows.to_frame(parse_rows(text, spec, plain_layout(spec, label=label)), spec)


def fitted(spec: FeatureSpec, directory: Path) -> nvtabular.Workflow:
    workflow = build(spec, str(directory / "fit"))
    return workflow.fit(nvtabular.Dataset(frame_of(TRAIN, spec), cpu=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("workflow")
    save(fitted(CRITEO, directory), CRITEO, directory / "workflow")
    shutil.rmtree(directory / "fit")
    return directory / "workflow"


@pytest.mark.parametrize("dense_transform", DENSE_TRANSFORMS)
@pytest.mark.parametrize("policy", [{}, {"freq_threshold": 5}, {"max_table_size": 12}])
def test_values_against_plain_python(tmp_path: Path, dense_transform: str, policy: dict) -> None:
    spec = dataclasses.replace(CRITEO.with_policy(**policy), dense_transform=dense_transform)
    description = save(fitted(spec, tmp_path), spec, tmp_path / "workflow")
    reference = Reference(TRAIN, spec)
    assert description.table_schema.table_sizes == reference.table_sizes()
    workflow = load(tmp_path / "workflow")
    for rows in (TRAIN, TEST):
        expected = reference.transform(rows)
        result = workflow.transform(frame_of(rows, spec))[spec.columns]
        assert result.dtypes.tolist() == expected.dtypes.tolist()
        ids = spec.categorical_names
        pd.testing.assert_frame_equal(result[ids], expected[ids])
        np.testing.assert_allclose(
            result[spec.dense_names], expected[spec.dense_names], rtol=3e-7, atol=1e-7
        )
        assert result[spec.label].tolist() == expected[spec.label].tolist()


def test_loaded_is_what_was_saved(saved: Path, tmp_path: Path) -> None:
    """Also from another place, as a genuine Workflow over a Dataset."""
    before = fitted(CRITEO, tmp_path).transform(frame_of(TEST))
    moved = shutil.copytree(saved, tmp_path / "moved")
    assert not any(str(tmp_path).encode() in f.read_bytes() for f in moved.rglob("*.json"))
    workflow = workflows.load(moved)
    assert isinstance(workflow, nvtabular.Workflow)
    pd.testing.assert_frame_equal(workflow.transform(frame_of(TEST)), before, check_like=True)
    dataset = workflow.transform(nvtabular.Dataset(frame_of(TEST), cpu=True))
    pd.testing.assert_frame_equal(dataset.to_ddf().compute(), before, check_like=True)


def test_two_workflows_at_one_path(saved: Path, tmp_path: Path) -> None:
    """NVTabular caches vocabularies by path: a second workflow there must not see the first's."""
    path = shutil.copytree(saved, tmp_path / "workflow")
    first = load(path).transform(frame_of(TRAIN))
    shutil.rmtree(path)
    spec = CRITEO.with_policy(max_table_size=5)
    save(fitted(spec, tmp_path), spec, path)
    second = load(path).transform(frame_of(TRAIN))
    assert first["cat_9"].max() > 5
    assert second["cat_9"].max() == 4


def test_an_unfitted_workflow_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="column cat_0: the workflow is not fitted"):
        save(build(CRITEO, str(tmp_path)), CRITEO, tmp_path / "workflow")
    assert not (tmp_path / "workflow" / "metadata.json").exists()
