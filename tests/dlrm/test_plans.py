"""The loss curve is the same under every plan, and that of a DLRM in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clicklog.schema import TableSchema
from dlrm.config import model_config
from dlrm.flags import parse_settings
from tests.dlrm.reference import reference_losses
from tests.dlrm.runs import MODEL, losses, train_here, train_many

GLOBAL_BATCH = 32
EPOCHS = 7  # of 30 steps: more than 200
RATES = {"sgd": 0.3, "adagrad": 0.02, "rowwise_adagrad": 0.05}
CASES = [
    (optimizer, sharding)
    for optimizer in RATES
    for sharding in ("table_wise", "row_wise", "column_wise")
    if (optimizer, sharding) != ("rowwise_adagrad", "column_wise")  # a moment per column shard
]


def _flags(data: Path, optimizer: str, *more: str) -> list[str]:
    return [
        f"--binary_path={data}",
        f"--optimizer={optimizer}",
        f"--learning_rate={RATES[optimizer]}",
        f"--epochs={EPOCHS}",
        "--validation_freq_within_epoch=1000",
        *more,
    ]


@pytest.fixture(scope="module")
def references(data) -> dict[str, list[float]]:
    config = model_config(parse_settings(MODEL), TableSchema.read(data))
    return {
        optimizer: reference_losses(
            data / "train",
            config,
            batch_size=GLOBAL_BATCH,
            epochs=EPOCHS,
            rate=lambda step, value=value: value,
            optimizer=optimizer,
        )
        for optimizer, value in RATES.items()
    }


@pytest.mark.parametrize("optimizer", RATES)
def test_one_rank(data, references, tmp_path, optimizer):
    train_here(*_flags(data, optimizer), f"--batch_size={GLOBAL_BATCH}", f"--log_path={tmp_path}")
    expected = references[optimizer]
    assert len(expected) > 200
    assert np.mean(expected[-30:]) < np.mean(expected[:30]) - 0.01, "it learns"
    np.testing.assert_allclose(losses(tmp_path), expected, rtol=0, atol=1e-5)


#: Four ranks on two cores are slow.
FEWER = [case for case in CASES if case[0] == "adagrad" or case == ("rowwise_adagrad", "row_wise")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, FEWER)])
def test_every_plan(data, references, tmp_path, ranks, cases):
    runs = [
        _flags(
            data,
            optimizer,
            f"--sharding={sharding}",
            f"--batch_size={GLOBAL_BATCH // ranks}",
            f"--log_path={tmp_path / optimizer / sharding}",
        )
        for optimizer, sharding in cases
    ]
    train_many(runs, ranks)
    for optimizer, sharding in cases:
        np.testing.assert_allclose(
            losses(tmp_path / optimizer / sharding),
            references[optimizer],
            rtol=0,
            atol=1e-5,
            err_msg=f"{optimizer}, {sharding}, {ranks} ranks",
        )
