from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import nvt_compat  # noqa: F401

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import workflows
from clicklog.errors import BadInputError, SchemaError
from clicklog.files import write_json
from clicklog.tokenizer import parse_rows
from dlrm.checkpoint import load_model
from dlrm.evaluate import score
from etl.run import EtlSettings, run
from inference import Predictor
from inference.__main__ import main
from nvt_loader import KJTLoader
from tests.logs import CRITEO, random_rows, write_day, write_log

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Trained:
    """A log, its ETL and a model trained on it."""

    raw: Path
    days: list
    workflow: Path
    parquet: Path
    checkpoint: Path

    @property
    def flags(self) -> list[str]:
        return ["--workflow", str(self.workflow), "--checkpoint", str(self.checkpoint)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, dask_client) -> Trained:
    base = tmp_path_factory.mktemp("inference")
    days = write_log(base / "raw", [400, 300, 201], seed=5)
    address = dask_client.scheduler.address
    run(EtlSettings(str(base / "raw"), base / "out", CRITEO, scheduler=address))
    parquet = base / "out" / "criteo_binary" / "split"
    flags = f"--binary_path {parquet} --save_checkpoint_path {base / 'checkpoint'} --adagrad "
    flags += "--embedding_dim 8 --dense_arch_layer_sizes 16,8 --over_arch_layer_sizes 16,1 "
    flags += "--learning_rate 0.1 --batch_size 64 --epochs 2"
    done = subprocess.run(
        [sys.executable, "train_torchrec.py", *flags.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Trained(base / "raw", days, base / "out" / "workflow", parquet, base / "checkpoint")


@pytest.fixture(scope="module")
def predictor(trained: Trained) -> Predictor:
    return Predictor(trained.workflow, trained.checkpoint)


def _frame(rows: list[list[str]]) -> pd.DataFrame:
    text = "\n".join("\t".join(row) for row in rows).encode()
    return workflows.to_frame(parse_rows(text, CRITEO, label=True), CRITEO)


def test_raw_rows_score_as_in_the_trainers_evaluation(trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "predictions.parquet"
    flags = [*trained.flags, "--input", str(trained.raw / "day_2"), "--output", str(output)]
    assert main(["predict", *flags]) == 0
    got = pq.read_table(output)
    assert got.schema.names == ["row", "probability", "label"]
    assert got["row"].to_pylist() == list(range(201))
    assert got["label"].to_pylist() == [int(row[0]) for row in trained.days[2]]
    model, _ = load_model(trained.checkpoint)
    logits = [
        score(model, KJTLoader(trained.parquet / split, 50, device="cpu", virtual_shards=1))[0]
        for split in ("valid", "test")
    ]
    expected = 1 / (1 + np.exp(-np.concatenate(logits)))
    np.testing.assert_allclose(got["probability"].to_numpy(), expected, atol=1e-6)
    assert np.ptp(expected) > 0.1  # the model says something


def test_without_labels_with_unseen_and_missing_values(
    trained: Trained, predictor: Predictor, tmp_path: Path
) -> None:
    rows = random_rows(50, 99)
    rows[0] = ["0", *["-77"] * 13, *["ffffffff"] * 26]
    rows[1] = ["0", *[""] * 39]
    expected = predictor.predict(_frame(rows))
    text = "\n".join("\t".join(row[1:]) for row in rows).encode()
    (tmp_path / "rows.gz").write_bytes(gzip.compress(text))
    output = tmp_path / "p.parquet"
    flags = [*trained.flags, "--input", str(tmp_path / "rows.gz"), "--output", str(output)]
    assert main(["predict", *flags]) == 0
    got = pq.read_table(output)
    assert got.schema.names == ["row", "probability"]
    np.testing.assert_allclose(got["probability"].to_numpy(), expected, atol=1e-6)
    assert np.isfinite(expected).all()
    assert ((expected > 0) & (expected < 1)).all()


def test_a_row_scores_the_same_in_any_company(predictor: Predictor) -> None:
    frame = _frame(random_rows(40, 7))
    together = predictor.predict(frame)
    alone = [predictor.predict(frame[i : i + 1])[0] for i in range(40)]
    np.testing.assert_allclose(alone, together, atol=1e-6)
    shuffled = frame.sample(frac=1, random_state=1)
    np.testing.assert_allclose(predictor.predict(shuffled), together[shuffled.index], atol=1e-6)
    assert predictor.predict(frame[:0]).shape == (0,)
    extra = frame.assign(more=1).drop(columns="label")[["more", *CRITEO.columns[:0:-1]]]
    np.testing.assert_array_equal(predictor.predict(extra), together)
    with pytest.raises(SchemaError, match="no column int_3, cat_9"):
        predictor.predict(frame.drop(columns=["cat_9", "int_3"]))


def test_frames_that_hold_something_else(predictor: Predictor) -> None:
    frame = _frame(random_rows(10, 8))
    expected = predictor.predict(frame)
    same = frame.astype(dict.fromkeys(CRITEO.categorical_names + ["int_2"], "Int64"))
    np.testing.assert_array_equal(predictor.predict(same), expected)

    def wrong(values) -> pd.DataFrame:
        return frame.assign(cat_4=values)

    for values, message in (
        (["0000001b"] * 10, r"column cat_4: .* values, numbers are needed\n.*int\(text, 16\)"),
        ([0.5] * 10, r"column cat_4, row 0: .*0.5.* is no category"),
        ([1] * 9 + [-1], r"column cat_4, row 9: .*-1"),
        ([2**32] * 10, r"is no category"),
        (np.full(10, 2**24 + 2, np.float32), "float32 rounds categories"),
    ):
        with pytest.raises(SchemaError, match=message):
            predictor.predict(wrong(values))
    with pytest.raises(SchemaError, match=r"column int_0: .* values, numbers are needed"):
        predictor.predict(frame.assign(int_0="1"))


def test_bad_rows(trained: Trained, predictor: Predictor, tmp_path: Path, capsys) -> None:
    rows = [list(row) for row in trained.days[2]]
    rows[9][30] = "xyz"
    write_day(tmp_path / "day", rows)
    output = tmp_path / "p.parquet"
    flags = [*trained.flags, "--input", str(tmp_path / "day"), "--output", str(output)]
    assert main(["predict", *flags]) == 2
    assert "day, line 10: column cat_16: 'xyz'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day"]
    assert main(["predict", *flags, "--bad_rows", "reject"]) == 0
    got = pq.read_table(output)
    assert got["row"].to_pylist() == [i for i in range(201) if i != 9]
    expected = predictor.predict(_frame(trained.days[2]))
    np.testing.assert_allclose(got["probability"], np.delete(expected, 9), atol=1e-6)


def test_an_output_is_not_overwritten(trained: Trained, tmp_path: Path, capsys) -> None:
    (tmp_path / "p.parquet").write_text("precious")
    flags = [*trained.flags, "--input", "none", "--output", str(tmp_path / "p.parquet")]
    assert main(["predict", *flags]) == 2
    assert "p.parquet exists" in capsys.readouterr().err
    assert (tmp_path / "p.parquet").read_text() == "precious"
    flags[-1] = "/proc/none/p.parquet"
    flags[-3] = str(trained.raw / "day_2")
    assert main(["predict", *flags]) == 2
    assert "/proc/none/p.parquet: cannot be written" in capsys.readouterr().err


def _rewritten(source: Path, target: Path, *, dense: int = 13, another: int | None = None) -> Path:
    """The same workflow with fewer dense columns, or with another value in cat_4's vocabulary."""
    description = workflows.inspect(source)
    vocabularies = {}
    for column in description.spec.categorical:
        vocabulary = description.vocabularies[column.name]
        values, counts = (c.to_numpy() for c in pq.read_table(source / vocabulary.file).columns)
        if another is not None and column.name == "cat_4":
            values, counts = np.append(values, another), np.append(counts, 1)
        vocabularies[column.name] = workflows.FittedVocabulary(values, counts, vocabulary.observed)
    spec = dataclasses.replace(description.spec, dense=description.spec.dense[:dense])
    state = workflows.Fitted(description.statistics, vocabularies)
    workflows.write_workflow(target, spec, state)
    return target


def test_a_pair_that_does_not_belong_together(trained: Trained, tmp_path: Path) -> None:
    workflow = trained.workflow
    checkpoint = shutil.copytree(trained.checkpoint, tmp_path / "checkpoint")
    record = json.loads((checkpoint / "model.json").read_text())
    assert record["training"]["workflow_digest"] == workflows.inspect(workflow).digest
    record["training"]["workflow_digest"] = "0" * 64
    write_json(checkpoint / "model.json", record)
    with pytest.raises(SchemaError, match=r"another workflow.*\n.*OUT/workflow beside"):
        Predictor(workflow, checkpoint)
    # without a recorded digest, columns and table sizes still have to fit
    record["training"]["workflow_digest"] = None
    write_json(checkpoint / "model.json", record)
    Predictor(_rewritten(workflow, tmp_path / "same"), checkpoint)
    with pytest.raises(SchemaError, match=r"column cat_4: .* gives ids up to \d+"):
        Predictor(_rewritten(workflow, tmp_path / "larger", another=2**32 - 1), checkpoint)
    with pytest.raises(SchemaError, match="dense columns of"):
        Predictor(_rewritten(workflow, tmp_path / "narrower", dense=12), checkpoint)


def test_paths_that_are_none(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"metadata.json: no such file"):
        Predictor(tmp_path, trained.checkpoint)
    with pytest.raises(BadInputError, match="no such checkpoint"):
        Predictor(trained.workflow, tmp_path / "none")
