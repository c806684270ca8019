"""Scores of a model on a GPU are those on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.etl.run import run
from nvt_torchrec.inference.model.scoring import KINDS
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.training.settings.train_settings import parse_settings
from tests.etl.runs import settings
from tests.logs import CRITEO, write_log
from tests.training.runs import EXAMPLE, MODEL, train_here


@dataclasses.dataclass
class Trained:
    workflow: Path
    checkpoint: Path
    rows: list[dict]


@pytest.fixture(scope="module")
def trained(device, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    base = tmp_path_factory.mktemp("trained")
    days = write_log(base / "raw", [400, 300, 201], seed=5)
    run(settings(base / "raw", base / "out"))
    flags = [f"--binary_path={base / 'out' / 'criteo_binary' / 'split'}", "--batch_size=64"]
    flags += [*EXAMPLE, "--adagrad", "--learning_rate=0.1", f"--log_path={base / 'log'}"]
    flags += [f"--save_checkpoint_path={base / 'checkpoint'}"]
    assert parse_settings([*MODEL, *flags]).adagrad
    train_here(*flags)
    names = [*CRITEO.dense_names, *CRITEO.categorical_names]
    rows = [dict(zip(names, row[1:], strict=True)) for row in days[-1]]
    for row in rows:
        for name in CRITEO.dense_names:
            row[name] = int(row[name]) if row[name] else None
    return Trained(base / "out" / "workflow", base / "checkpoint", rows)


@pytest.mark.parametrize("tables", KINDS)
def test_scores_are_those_of_the_cpu(device, trained: Trained, tables: str) -> None:
    on = [
        Predictor.load(trained.workflow, trained.checkpoint, device=place, tables=tables)
        for place in ("cpu", device)
    ]
    for rows in (trained.rows, trained.rows[:1]):
        expected, found = (predictor.predict(rows) for predictor in on)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert on[1].model.device.type == device.type
