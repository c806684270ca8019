"""Models of one and of both labels of weighted rows: Python, files, comparisons, server, export."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import tritonclient.http
from sklearn import metrics as sklearn

import benchmarks.inference
from benchmarks.inference import read_first_rows
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.etl.run import run
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.commands.lineage import read_lineage
from nvt_torchrec.inference.model.bundle import save_bundle, write_bundle
from nvt_torchrec.inference.model.served_checkpoint import read_checkpoint
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.publish.steps import score_labelled
from nvt_torchrec.inference.scorer import Scorer
from nvt_torchrec.nvt_loader import KJTLoader
from tests.etl.runs import settings
from tests.inference.bundles import make_origin, publish
from tests.inference.serving import serving
from tests.training.runs import model_of, train_here
from tests.weighted_logs import write_weighted_log

BOTH = ("liked", "bought")


@dataclasses.dataclass
class Log:
    """A log with two labels, its ETL, and the raw rows of valid and test."""

    directory: Path
    rows: pd.DataFrame

    @property
    def day(self) -> Path:
        return self.directory / "raw" / "day_2.csv"

    @property
    def workflow(self) -> Path:
        return self.directory / "out" / "workflow"

    @property
    def split(self) -> Path:
        return self.directory / "out" / "criteo_binary" / "split"

    def train(self, name: str, *flags: str) -> dict[str, dict]:
        """Train ``NAME.checkpoint``, and bundle it as ``NAME``."""
        checkpoint = self.directory / f"{name}.checkpoint"
        common = [f"--binary_path={self.split}", "--batch_size=50", "--adagrad"]
        common += [
            f"--save_checkpoint_path={checkpoint}",
            f"--log_path={self.directory / name}-log",
        ]
        result = train_here(*common, *flags)
        write_bundle(self.workflow, checkpoint, self.directory / name)
        return result.metrics


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    directory = tmp_path_factory.mktemp("labels")
    spec, days = write_weighted_log(directory, [400, 300, 200])
    run(settings(directory / "raw", directory / "out", spec))
    days[2]["liked"] = (days[2]["rating"] >= 4).astype(int)
    return Log(directory, days[2])


@pytest.fixture(scope="module")
def bought(log: Log) -> SimpleNamespace:
    """A model of the second label, and the metrics of its training."""
    return SimpleNamespace(metrics=log.train("one", "--label=bought"), bundle=log.directory / "one")


@pytest.fixture(scope="module")
def both(log: Log) -> Path:
    """The bundle of a model of both labels, with a linear term."""
    flags = ["--label=liked,bought", "--first_order=1", "--over_arch_layer_sizes=16,2"]
    log.train("two", *flags)
    return log.directory / "two"


def weighted(scores: np.ndarray, rows: pd.DataFrame, label: str = "bought") -> dict[str, float]:
    given = {"sample_weight": rows["w"]}
    return {
        "auroc": sklearn.roc_auc_score(rows[label], scores, **given),
        "log_loss": sklearn.log_loss(rows[label], scores.astype(np.float64), **given),
    }


def assert_metrics(found: dict, expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6)


def test_bulk_scores_are_evaluated_as_in_training(bought, log: Log, tmp_path: Path, capsys) -> None:
    output = tmp_path / "scores.parquet"
    flags = ["--bundle", str(bought.bundle), "--input", str(log.day)]
    assert main(["predict", *flags, "--output", str(output), "--evaluate"]) == 0
    scored = pq.read_table(output)
    assert scored.schema.names == ["row", "probability", "label", "weight"]
    assert scored["label"].to_pylist() == log.rows["bought"].tolist()
    assert scored["weight"].to_pylist() == log.rows["w"].tolist()
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert_metrics(printed, weighted(scored["probability"].to_numpy(), log.rows))
    assert printed["total_weight"] == log.rows["w"].sum()
    parts = bought.metrics["valid"], bought.metrics["test"]
    for name in ("samples", "positives"):
        assert printed[name] == sum(part[name] for part in parts)
    mean = sum(part["log_loss"] * part["total_weight"] for part in parts) / printed["total_weight"]
    assert printed["log_loss"] == pytest.approx(mean, abs=1e-6)


def test_comparisons_use_label_and_weights(bought, log: Log) -> None:
    predictor = Predictor.load(bought.bundle)
    expected = weighted(predictor.predict(log.day), log.rows)
    metrics = score_labelled({"one": predictor}, str(log.day), None, 1000)["bought"]["one"]
    assert_metrics(vars(metrics), expected)
    some = score_labelled({"one": predictor}, str(log.day), None, 37)["bought"]["one"]
    assert (some.samples, some.positives) == (37, log.rows["bought"][:37].sum())
    assert some.total_weight == pytest.approx(log.rows["w"][:37].sum())
    liked = dataclasses.replace(predictor.model.config, labels=("liked",))
    other = Predictor(predictor.workflow, dataclasses.replace(predictor.model, config=liked))
    with pytest.raises(SchemaError, match="model two predicts liked, the first one bought"):
        score_labelled({"one": predictor, "two": other}, str(log.day), None, 37)


def test_a_label_that_the_workflow_has_not(bought, log: Log, tmp_path: Path) -> None:
    model, _ = read_checkpoint(log.directory / "one.checkpoint", torch.device("cpu"))
    sold = dataclasses.replace(model.config, labels=("sold",))
    model = dataclasses.replace(model, config=sold)
    save_bundle(tmp_path / "b", log.workflow, model, make_origin(0, (0,)))
    with pytest.raises(SchemaError, match=r"predicts sold, but .* has the labels liked, bought"):
        Predictor.load(tmp_path / "b")


def test_both_labels_in_python(both: Path, log: Log) -> None:
    """As TorchRec's model scores the parquet; one row, many, a file, encoded rows, int8."""
    model, scorer, expected, encoded = (
        model_of(log.directory / "two.checkpoint"),
        Scorer.load(both),
        [],
        [],
    )
    assert scorer.labels == BOTH
    for split in ("valid", "test"):
        for batch in KJTLoader(log.split / split, 50, device="cpu", virtual_shards=1):
            expected.append(torch.sigmoid(model(batch.dense_features, batch.sparse_features)))
            encoded.append(scorer.predict(batch.dense_features, batch.sparse_features))
    expected = torch.cat(expected).numpy()
    assert expected.shape == (200, 2)
    np.testing.assert_allclose(np.concatenate(encoded), expected, atol=1e-6)
    predictor = Predictor.load(both)
    assert predictor.labels == BOTH
    np.testing.assert_allclose(predictor.predict(log.day), expected, atol=1e-6)
    rows = read_first_rows(str(log.day), predictor.spec, 200)
    np.testing.assert_allclose(predictor.predict(rows), expected, atol=1e-6)
    np.testing.assert_allclose(predictor.predict(rows[:1]), expected[:1], atol=1e-6)
    assert predictor.predict([]).shape == (0, 2)
    small = Predictor.load(both, tables="int8")
    np.testing.assert_allclose(small.predict(rows), expected, atol=0.02)
    table = predictor.model.table.values
    exact = small.model.table.look_up(torch.arange(len(table)))
    assert torch.equal(exact[:, :2], table[:, :2]), "weights of the linear term stay float32"
    assert not torch.equal(exact, table)


def test_both_labels_in_bulk(both: Path, log: Log, tmp_path: Path, capsys) -> None:
    output = tmp_path / "scores.parquet"
    flags = ["predict", "--bundle", str(both), "--input", str(log.day), "--output", str(output)]
    assert main([*flags, "--id_columns", "label_liked"]) == 2
    assert "'label_liked' is in the output already" in capsys.readouterr().err
    assert main([*flags, "--evaluate"]) == 0
    scored = pq.read_table(output).to_pandas()
    names = [f"{what}_{label}" for what in ("probability", "label") for label in BOTH]
    assert list(scored) == ["row", *names, "weight"]
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(printed) == [*BOTH]
    expected = Predictor.load(both).predict(log.day)
    for t, label in enumerate(BOTH):
        assert scored[f"probability_{label}"].tolist() == pytest.approx(expected[:, t], abs=1e-6)
        assert scored[f"label_{label}"].tolist() == log.rows[label].tolist()
        assert_metrics(printed[label], weighted(expected[:, t], log.rows, label))


@pytest.mark.usefixtures("warm_trials")
def test_both_labels_served(both: Path, bought, log: Log, tmp_path: Path) -> None:
    """As JSON, by Triton's client and in the metrics; a bundle of one label is not followed."""
    predictor = Predictor.load(both)
    rows = read_first_rows(str(log.day), predictor.spec, 60)
    expected = dict(zip(BOTH, predictor.predict(rows).T, strict=True))
    served = tmp_path / "served"
    assert publish(both, served).before is None
    with serving(tmp_path, "--bundle", str(served / "current")) as server:
        answer = server.predict(rows=rows)
        assert list(answer) == [*BOTH]
        client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}")
        described = client.get_model_metadata("click_probability")
        outputs = [output["name"] for output in described["outputs"]]
        assert outputs == ["probability_liked", "probability_bought"]
        inputs = []
        for name, values in to_tensors(list_inputs(predictor.spec), rows).items():
            kind = "BYTES" if values.dtype == object else "FP64"
            given = tritonclient.http.InferInput(name, (60, 1), kind)
            inputs.append(given.set_data_from_numpy(values[:, None]))
        whole = client.infer("click_probability", inputs)
        second = tritonclient.http.InferRequestedOutput(outputs[1], binary_data=False)
        part = client.infer("click_probability", inputs, outputs=[second])
        assert part.as_numpy(outputs[0]) is None
        np.testing.assert_allclose(part.as_numpy(outputs[1])[:, 0], expected["bought"], atol=1e-6)
        for name, (label, values) in zip(outputs, expected.items(), strict=True):
            np.testing.assert_allclose(answer[label], values, atol=1e-6)
            np.testing.assert_allclose(whole.as_numpy(name)[:, 0], values, atol=1e-6)
            total = server.metric(f'inference_probability_sum_total{{label="{label}"}}')
            assert total == pytest.approx(3 * values.sum(), rel=1e-5)
        assert server.predict(rows=[]) == {"liked": [], "bought": []}
    with pytest.raises(SchemaError, match="the served bundle predicts liked, bought"):
        publish(bought.bundle, served)


@pytest.mark.usefixtures("warm_trials")
def test_gates_hold_for_each_label(both: Path, log: Log, tmp_path: Path, capsys) -> None:
    """A model that is bad for one label is refused, and the label is named."""
    model, _ = read_checkpoint(log.directory / "two.checkpoint", torch.device("cpu"))
    model.head.first_order.bias[1] += 3.0
    worse = tmp_path / "worse"
    save_bundle(worse, log.workflow, model, make_origin(None, (0,)))
    to = tmp_path / "served"
    sample = ["--sample", str(log.day), "--json", "--to", str(to)]
    assert main(["publish", str(both), *sample]) == 0
    first = json.loads(capsys.readouterr().out)
    assert list(first["metrics"]) == [*BOTH]
    assert main(["publish", str(worse), *sample]) == 3
    refused = json.loads(capsys.readouterr().out)
    (refusal,) = refused["refusals"]
    assert refusal.startswith("bought: the calibration error grows by")
    assert refused["metrics"]["liked"]["served"] == first["metrics"]["liked"]["new"]
    assert main(["publish", str(worse), *sample[:2], "--to", str(to)]) == 3
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:8]] == [
        *("liked", "served", "new", "change"),
        *("bought", "served", "new", "change"),
    ]
    (entry,) = json.loads((to / "history.json").read_text())["entries"]
    assert entry["metrics"]["bought"].items() <= first["metrics"]["bought"]["new"].items()
    assert "predicts liked, bought" in read_lineage(both)


@pytest.mark.parametrize("tables", ["float32", "int8"])
def test_both_labels_exported(both: Path, log: Log, tmp_path: Path, capsys, tables: str) -> None:
    bundle = tmp_path / "bundle"
    write_bundle(log.workflow, log.directory / "two.checkpoint", bundle, tables=tables)
    flags = ["export", "--bundle", str(bundle), "--format", "triton"]
    assert main([*flags, "--output", str(tmp_path / "export")]) == 0
    repository = tmp_path / "export" / "click_probability"
    outputs = (repository / "config.pbtxt").read_text().partition("output [")[2]
    file = repository / "1" / "model.onnx"
    predictor, session = Predictor.load(bundle), onnxruntime.InferenceSession(file)
    names = [output.name for output in session.get_outputs()]
    assert names == ["probability_liked", "probability_bought"]
    assert all(f'name: "{name}"' in outputs for name in names)
    rows = read_first_rows(str(log.day), predictor.spec, 60)
    for count in (1, 60):
        given = to_tensors(list_inputs(predictor.spec), rows[:count])
        scores = np.stack(session.run(names, given), 1)
        np.testing.assert_allclose(scores, predictor.predict(rows[:count]), atol=1e-6)
    capsys.readouterr()
    measured = ["--bundle", str(bundle), "--input", str(log.day), "--onnx", str(file)]
    assert benchmarks.inference.main([*measured, "--batch_sizes", "8", "--seconds", "0.01"]) == 0
    assert "onnx: tensors to probability" in capsys.readouterr().out
