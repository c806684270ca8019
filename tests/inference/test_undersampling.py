"""A model trained on a share of the rows without a click gives the click rate of the whole log."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec.inference.export.onnx_file import export_onnx
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.named_tensors import list_inputs
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.training.baselines.baselines import CLICK_RATE, REGRESSION
from tests.inference.exported import score
from tests.plays import SHARE, write_plays
from tests.training.runs import events, train_here

RATE = 0.2


def test_scores_are_those_of_the_whole_log(tmp_path):
    split = write_plays(tmp_path, SHARE)
    log = pd.read_csv(tmp_path / "log.csv")
    flags = [f"--binary_path={split}", f"--undersampling_rate={RATE}", "--epochs=4"]
    flags += ["--batch_size=32", f"--log_path={tmp_path}"]
    result = train_here(*flags, f"--save_checkpoint_path={tmp_path / 'end'}")
    assert result.samples < 0.7 * 4 * 2_400
    baselines = events(tmp_path, "baseline")
    assert {event["name"] for event in baselines} == {CLICK_RATE, REGRESSION}
    found = [metrics["calibration"] for metrics in result.metrics.values()]
    found += [event["calibration"] for event in baselines]
    assert max(abs(calibration - 1) for calibration in found) < 0.2, found
    write_bundle(tmp_path / "out" / "workflow", tmp_path / "end", tmp_path / "bundle")
    scores = Predictor.load(tmp_path / "bundle").predict(log)
    assert scores.mean() == pytest.approx(log["played"].mean(), rel=0.05)
    checkpoint = Predictor.load(tmp_path / "out" / "workflow", tmp_path / "end")
    np.testing.assert_array_equal(checkpoint.predict(log), scores)
    export_onnx(tmp_path / "bundle", tmp_path / "export")
    columns = list_inputs(checkpoint.spec)
    given = {c.name: log[c.name].to_numpy("O" if c.kind == "string" else c.kind) for c in columns}
    np.testing.assert_allclose(score(tmp_path / "export", given), scores, atol=1e-6)
