"""A model of one of several labels on weighted rows: bundle, bulk scores, comparisons, export."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from sklearn import metrics as sklearn

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.etl.run import run
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.model.bundle import describe, save_bundle, write_bundle
from nvt_torchrec.inference.model.weights import read_checkpoint
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.publish.steps import score_labelled
from tests.dlrm.runs import train_here
from tests.etl.runs import settings
from tests.inference.bundles import make_origin
from tests.weighted_logs import write_weighted_log


@dataclasses.dataclass
class Bought:
    """A model of the label ``bought``, the raw day of valid and test, and their metrics."""

    directory: Path
    day: Path
    rows: pd.DataFrame
    metrics: dict[str, dict[str, float]]

    @property
    def bundle(self) -> Path:
        return self.directory / "bundle"


@pytest.fixture(scope="module")
def bought(tmp_path_factory: pytest.TempPathFactory) -> Bought:
    directory = tmp_path_factory.mktemp("bought")
    spec, days = write_weighted_log(directory, [400, 300, 200])
    run(settings(directory / "raw", directory / "out", spec))
    flags = [f"--binary_path={directory / 'out/criteo_binary/split'}", "--batch_size=50"]
    flags += [f"--save_checkpoint_path={directory / 'checkpoint'}", "--label=bought", "--adagrad"]
    result = train_here(*flags, f"--log_path={directory / 'log'}")
    write_bundle(directory / "out" / "workflow", directory / "checkpoint", directory / "bundle")
    day = directory / "raw" / "day_2.csv"
    return Bought(directory, day, days[2], result.metrics)


def weighted(scores: np.ndarray, rows: pd.DataFrame) -> dict[str, float]:
    given = {"sample_weight": rows["w"]}
    return {
        "auroc": sklearn.roc_auc_score(rows["bought"], scores, **given),
        "log_loss": sklearn.log_loss(rows["bought"], scores.astype(np.float64), **given),
    }


def test_bundles_know_their_label(bought: Bought) -> None:
    assert describe(bought.bundle).model.label == "bought"
    assert describe(bought.bundle).origin.checkpoint.settings["label"] == "bought"
    workflow = bought.directory / "out" / "workflow"
    assert Predictor.load(workflow, bought.directory / "checkpoint").label == "bought"


def test_bulk_scores_are_evaluated_as_in_training(bought: Bought, tmp_path: Path, capsys) -> None:
    output = tmp_path / "scores.parquet"
    flags = ["--bundle", str(bought.bundle), "--input", str(bought.day)]
    assert main(["predict", *flags, "--output", str(output), "--evaluate"]) == 0
    scored = pq.read_table(output)
    assert scored.schema.names == ["row", "probability", "label", "weight"]
    assert scored["label"].to_pylist() == bought.rows["bought"].tolist()
    assert scored["weight"].to_pylist() == bought.rows["w"].tolist()
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    scores = scored["probability"].to_numpy()
    for name, value in weighted(scores, bought.rows).items():
        assert printed[name] == pytest.approx(value, abs=1e-6)
    assert printed["total_weight"] == bought.rows["w"].sum()
    both = bought.metrics["valid"], bought.metrics["test"]
    assert printed["samples"] == sum(part["samples"] for part in both)
    assert printed["positives"] == sum(part["positives"] for part in both)
    mean = sum(part["log_loss"] * part["total_weight"] for part in both) / printed["total_weight"]
    assert printed["log_loss"] == pytest.approx(mean, abs=1e-6)


def test_comparisons_use_label_and_weights(bought: Bought) -> None:
    predictor = Predictor.load(bought.bundle)
    expected = weighted(predictor.predict(bought.day), bought.rows)
    metrics = score_labelled({"one": predictor}, str(bought.day), None, 1000)["one"]
    for name, value in expected.items():
        assert getattr(metrics, name) == pytest.approx(value, abs=1e-6)
    some = score_labelled({"one": predictor}, str(bought.day), None, 37)["one"]
    assert (some.samples, some.positives) == (37, bought.rows["bought"][:37].sum())
    assert some.total_weight == pytest.approx(bought.rows["w"][:37].sum())
    other = Predictor(predictor.workflow, predictor.model)
    assert other.label == "liked"
    with pytest.raises(SchemaError, match="model two predicts label liked, the first one bought"):
        score_labelled({"one": predictor, "two": other}, str(bought.day), None, 37)


def test_a_label_that_the_workflow_has_not(bought: Bought, tmp_path: Path) -> None:
    workflow = bought.directory / "out" / "workflow"
    model, shape = read_checkpoint(bought.directory / "checkpoint", torch.device("cpu"))
    shape = dataclasses.replace(shape, label="sold")
    save_bundle(tmp_path / "b", workflow, model, shape, origin=make_origin(0, (0,)))
    with pytest.raises(SchemaError, match=r"predicts label sold, .* has liked, bought"):
        Predictor.load(tmp_path / "b")
