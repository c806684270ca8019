"""A log without a dense column: from the ETL's files to scores, every way there is."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec, InputFormat
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.model.served_checkpoint import check_pair
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.scorer import Scorer
from nvt_torchrec.models.contract import Build, load_build
from tests.inference.conftest import Trained, train_model
from tests.inference.exported import score
from tests.inference.serving import serving
from tests.inference.test_predictor import trainers_scores
from tests.spec_logs import write_spec_log
from tests.training.own_models import write_models
from tests.training.runs import config_of

SPEC = FeatureSpec(
    "click",
    (),
    (
        CategoricalColumn("user", raw="int"),
        CategoricalColumn("site", raw="hex32"),
        CategoricalColumn("tags", raw="int", multi_hot=True),
    ),
    input=InputFormat("parquet"),
)


OWN = ["--model=their_models:deep_fm", "--model_settings", 'pair=["user", "site"]', "means=true"]


@pytest.fixture(scope="module", params=[[], OWN], ids=["original", "own"])
def sparse(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """The module of an own model is there in training, and where a checkpoint is read."""
    base = tmp_path_factory.mktemp("sparse")
    write_spec_log(base / "raw", SPEC, rows=200)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.chdir(write_models(base))
        yield train_model(base, SPEC, *request.param)
    sys.modules.pop("their_models", None)


@pytest.fixture(scope="module")
def bundle(sparse: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse_bundle") / "bundle"
    write_bundle(sparse.workflow, sparse.checkpoint, path, build=own_build(sparse))
    return path


def own_build(sparse: Trained) -> Build | None:
    """The function of the own model, if it is one."""
    return load_build(config_of(sparse.checkpoint).model)


def raw_rows(sparse: Trained) -> list[dict]:
    """The last day, whose halves are the valid and the test set."""
    rows = pq.read_table(sparse.raw / "day_2.parquet").to_pylist()
    return [{name: row[name] for name in SPEC.categorical_names} for row in rows]


def test_every_way_scores_as_training_evaluates(
    sparse: Trained, bundle: Path, tmp_path: Path
) -> None:
    expected = trainers_scores(sparse.parquet, sparse.checkpoint)
    rows = raw_rows(sparse)
    checkpoint = Predictor.load(sparse.workflow, sparse.checkpoint, model=own_build(sparse))
    np.testing.assert_allclose(checkpoint.predict(rows), expected, atol=1e-6)
    opened = Predictor.load(bundle, check=True)
    np.testing.assert_allclose(opened.predict(rows), expected, atol=1e-6)
    in_8_bits = Predictor.load(bundle, tables="int8").predict(rows)
    np.testing.assert_allclose(in_8_bits, expected, atol=0.02)
    encoded = opened.workflow.transform(opened.read(rows)).ids
    users, sites, tags = encoded.columns
    lists = [ids.tolist() for ids in np.split(tags, encoded.lengths[2].cumsum()[:-1])]
    given = [list(row) for row in zip(users.tolist(), sites.tolist(), lists, strict=True)]
    none = np.empty((len(rows), 0))
    np.testing.assert_allclose(Scorer(opened).predict(none, given), expected, atol=1e-6)
    config = opened.model.config
    if config.own:
        given[0][0] = [users[0], users[0]]
        with pytest.raises(SchemaError, match="column user: the model takes its ids, but a row"):
            Scorer(opened).predict(none, given)
        config = dataclasses.replace(
            config, own=dataclasses.replace(config.own, id_columns=("tags",))
        )
        with pytest.raises(SchemaError, match="takes the ids of tags, which is multi-hot"):
            check_pair(opened.workflow.schema, "", config, "", "workflow", "model")
    bulk = ["--input", str(sparse.raw / "day_2.parquet"), "--output", str(tmp_path / "p.parquet")]
    assert main(["predict", "--bundle", str(bundle), *bulk]) == 0
    in_bulk = pq.read_table(tmp_path / "p.parquet")["probability"].to_numpy()
    np.testing.assert_allclose(in_bulk, expected, atol=1e-6)
    with serving(tmp_path, "--bundle", str(bundle)) as server:
        np.testing.assert_allclose(server.predict(rows=rows[:50]), expected[:50], atol=1e-6)
        columns = {name: [row[name] for row in rows[:50]] for name in rows[0]}
        np.testing.assert_allclose(server.predict(columns=columns), expected[:50], atol=1e-6)


def test_a_file_for_onnx(sparse: Trained, bundle: Path, tmp_path: Path) -> None:
    assert main(["export", "--bundle", str(bundle), "--output", str(tmp_path / "export")]) == 0
    predictor, rows = Predictor.load(bundle), raw_rows(sparse)
    for row in rows:
        row["site"] = None if row["site"] is None else f"{row['site']:08x}"
    for count in (1, 30):
        scores = score(tmp_path / "export", to_tensors(list_inputs(SPEC), rows[:count]))
        np.testing.assert_allclose(scores, predictor.predict(rows[:count]), atol=1e-6)
