"""Training on a GPU: the CPU's losses, bf16, tables in host memory, checkpoints both ways."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nvt_torchrec.dlrm.checkpoint.store import load_model
from nvt_torchrec.dlrm.config import model_config
from nvt_torchrec.dlrm.planning import plan_only
from nvt_torchrec.dlrm.settings.train_settings import parse_settings
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import KJTLoader
from tests.dlrm.reference import reference_losses
from tests.dlrm.runs import MODEL, ROOT, events, losses, run_command, torchrun, train_here
from tests.nvt_loader.data import write_split

TABLE_SIZES = (10, 50, 200, 3)
#: One table of 64 MB, and a GPU that has 56 MB for tables.
LARGE = ["--num_embeddings_per_feature=10,50,2000000,3", "--hbm_gib=0.07"]
RATES = {"sgd": 0.3, "adagrad": 0.1, "rowwise_adagrad": 0.1, "adam": 0.01}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last training step has one row."""
    path = tmp_path_factory.mktemp("data") / "criteo_binary" / "split"
    files = {"train": [600, 320, 9], "valid": [333], "test": [201]}
    write_split(path, files, table_sizes=TABLE_SIZES, dense=3)
    return path


def train(data: Path, log: Path, *flags: str) -> list[float]:
    """The losses of a run of two epochs on this machine's device."""
    common = [f"--binary_path={data}", f"--log_path={log}", "--batch_size=32", "--epochs=2"]
    train_here(*common, *flags)
    return losses(log)


def expected(data: Path, *flags: str) -> list[float]:
    """The losses of plain PyTorch on the CPU."""
    settings = parse_settings([*MODEL, *flags])
    return reference_losses(
        data / "train",
        model_config(settings, TableSchema.read(data)),
        batch_size=32,
        epochs=2,
        rate=lambda _: settings.learning_rate,
        optimizer=settings.table_optimizer,
        seed=settings.seed,
    )


@pytest.mark.parametrize("optimizer", RATES)
def test_losses_are_those_of_the_cpu(device, data: Path, tmp_path: Path, optimizer: str) -> None:
    flags = [f"--optimizer={optimizer}", f"--learning_rate={RATES[optimizer]}"]
    reference = expected(data, *flags)
    assert np.abs(np.diff(reference)).max() > 0.01
    found = train(data, tmp_path / "log", *flags)
    np.testing.assert_allclose(found, reference, rtol=0, atol=1e-3)
    (start,) = events(tmp_path / "log", "start")
    assert start["device"].startswith(device.type)


@pytest.mark.parametrize(
    "speed",
    [
        "--amp",
        "--allow_tf32",
        "--table_precision=fp16",
        "--table_precision=fp16 --amp",
    ],
)
def test_faster_arithmetic_trains_alike(device, data: Path, tmp_path: Path, speed: str) -> None:
    """bfloat16 has 8 bits, TF32 has 10: the losses of a batch of 32 rows are near."""
    flags = ["--adagrad", "--learning_rate=0.1"]
    reference = expected(data, *flags)
    found = train(data, tmp_path / "log", *flags, *speed.split())
    difference = np.abs(np.subtract(found, reference))
    assert difference[0] < 0.02  # before anything was trained
    assert difference.mean() < 0.03


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--amp"],
        ["--interaction_type=dcn", "--dcn_num_layers=2", "--dcn_low_rank_dim=4"],
    ],
    ids=" ".join,
)
def test_replays_train_as_launches(
    device, data: Path, tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense layers that are compiled are replayed as CUDA graphs."""
    common = ["--adagrad", "--learning_rate=0.1", *flags]
    launched = train(data, tmp_path / "launched", *common)
    replay, replays = torch.cuda.CUDAGraph.replay, []
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph)
    )
    replayed = train(data, tmp_path / "replayed", *common, "--compile_dense")
    assert bool(replays) == (device.type == "cuda")
    difference = np.abs(np.subtract(replayed, launched))
    assert difference.max() < (0.02 if "--amp" in flags else 1e-3)
    assert np.abs(np.diff(launched)).max() > 0.01


def test_the_plan_puts_large_tables_into_host_memory(data: Path) -> None:
    """Which is decided without a GPU."""
    settings = parse_settings(
        [*MODEL, f"--binary_path={data}", "--optimizer=sgd", "--plan_only=1", *LARGE]
    )
    text = plan_only(settings)
    (line,) = [line for line in text.splitlines() if line.startswith("t_cat_2")]
    assert "fused_uvm_caching" in line


def test_tables_larger_than_memory(device, data: Path, tmp_path: Path) -> None:
    """Cached by FBGEMM's UVM kernel they train as in the GPU's own memory."""
    flags = ["--adagrad", "--learning_rate=0.1", LARGE[0]]
    if device.type == "cuda":
        flags.append(LARGE[1])
    found = train(data, tmp_path / "log", *flags)
    np.testing.assert_allclose(found, expected(data, *flags), rtol=0, atol=1e-3)
    if device.type == "cuda":
        (start,) = events(tmp_path / "log", "start")
        kernels = {table["table"]: table["kernel"] for table in start["plan"]["tables"]}
        assert kernels["t_cat_2"] == "fused_uvm_caching"


@pytest.mark.parametrize("flag", ["--sharding=table_wise", "--sharding=row_wise"])
def test_two_gpus_train_as_one(device, data: Path, tmp_path: Path, flag: str) -> None:
    """Under NCCL, also on the last step of an epoch, where rank 0 has no row."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    flags = ["--adagrad", "--learning_rate=0.1", flag, "--epochs=2"]
    where = [f"--binary_path={data}", "--batch_size=16", f"--log_path={tmp_path / 'log'}"]
    done = torchrun("train_torchrec.py", *MODEL, *where, *flags)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "log"), expected(data, *flags), rtol=0, atol=1e-3)


def test_checkpoints_both_ways(device, data: Path, tmp_path: Path, monkeypatch) -> None:
    """Written on the GPU: scores alike on the CPU. Written on the CPU: tests alike on the GPU."""
    flags = ["--adagrad", "--learning_rate=0.1"]
    path = tmp_path / "checkpoint"
    train(data, tmp_path / "log", *flags, f"--save_checkpoint_path={path}")
    batch = next(iter(KJTLoader(data / "test", 201, device="cpu")))
    logits = []
    for place in ("cpu", device):
        model, _ = load_model(path, place)
        moved = batch.to(torch.device(place))
        logits.append(model(moved.dense_features, moved.sparse_features).cpu())
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that are started
    other = tmp_path / "cpu"
    common = [f"--binary_path={data}", "--batch_size=32", *MODEL, *flags]
    script = [sys.executable, str(ROOT / "train_torchrec.py")]
    trained = run_command(
        [*script, *common, f"--save_checkpoint_path={other}", f"--log_path={tmp_path / 'cpu_log'}"]
    )
    assert trained.returncode == 0, trained.stderr
    record = json.loads((other / "model.json").read_text())["training"]["metrics"]["test"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    result = train_here(
        *[f"--binary_path={data}", "--batch_size=32", "--mode=test"],
        f"--load_checkpoint_path={other}",
        f"--log_path={tmp_path / 'test_log'}",
    )
    assert result.metrics["test"].log_loss == pytest.approx(record["log_loss"], abs=1e-5)
    assert result.metrics["test"].auroc == pytest.approx(record["auroc"], abs=1e-4)


def test_goes_on_after_a_checkpoint(device, data: Path, tmp_path: Path) -> None:
    """Weights, optimizer state and the loader's place: the rest is as if nothing had happened."""
    flags = ["--adagrad", "--learning_rate=0.1", "--shuffle_training_set"]
    whole = train(data, tmp_path / "whole", *flags)
    where = [f"--checkpoint_dir={tmp_path / 'run'}", "--checkpoint_freq=20"]
    train(data, tmp_path / "first", *flags, *where, "--max_steps=20")
    rest = train(data, tmp_path / "rest", *flags, *where, "--resume")
    np.testing.assert_allclose(rest, whole[20:], rtol=0, atol=1e-5)
