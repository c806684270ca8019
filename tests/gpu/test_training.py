"""Training on a GPU: the CPU's losses, bf16, tables in host memory, checkpoints both ways."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.vector_join import VectorJoin
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding import build
from nvt_torchrec.training.sharding.plan_only import plan_only
from tests.nvt_loader.data import write_split
from tests.plays import SHARE, write_plays
from tests.training.reference import reference_losses
from tests.training.runs import (
    EXAMPLE,
    MODEL,
    ROOT,
    events,
    losses,
    model_of,
    passed,
    run_command,
    small_run,
    torchrun,
    train_here,
    train_losses,
    train_script,
    written_to,
)

TABLE_SIZES = (10, 50, 200, 3)
#: One table of 64 MB, and a GPU that has 56 MB for tables.
LARGE = ["--num_embeddings_per_feature=10,50,2000000,3", "--hbm_gib=0.07"]
RATES = {"sgd": 0.3, "adagrad": 0.1, "rowwise_adagrad": 0.1, "adam": 0.01}
ADAGRAD = [*EXAMPLE, "--adagrad", "--learning_rate=0.1", "--epochs=2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last training step has one row."""
    path = tmp_path_factory.mktemp("data") / "criteo_binary" / "split"
    files = {"train": [600, 320, 9], "valid": [333], "test": [201]}
    write_split(path, files, table_sizes=TABLE_SIZES, dense=3)
    return path


def _skip_adam(device: torch.device, optimizer: str) -> None:
    if device.type == "cpu" and optimizer == "adam":
        pytest.skip("FBGEMM has no Adam on CPUs")


@pytest.mark.parametrize("optimizer", RATES)
def test_losses_are_those_of_the_cpu(device, data: Path, tmp_path: Path, optimizer: str) -> None:
    _skip_adam(device, optimizer)
    flags = [
        *EXAMPLE,
        f"--optimizer={optimizer}",
        f"--learning_rate={RATES[optimizer]}",
        "--epochs=2",
    ]
    reference = reference_losses(data, *flags)
    assert np.abs(np.diff(reference)).max() > 0.01
    found = train_losses(data, tmp_path, *flags)
    np.testing.assert_allclose(found, reference, rtol=0, atol=1e-3)
    (start,) = events(tmp_path / "log", "start")
    assert start["device"].startswith(device.type)


def test_defaults_train_as_on_the_cpu(device, tmp_path: Path, monkeypatch) -> None:
    """README's command, with no flag but paths: trials on valid, bins, linear term, stopping.

    The losses of a trial differ by rounding, so that another one may be the best.
    """
    data = write_plays(tmp_path, SHARE, rows=3_000, users=60, items=40, crossed=1.5)
    command = [sys.executable, str(ROOT / "train_torchrec.py"), f"--binary_path={data}"]
    passed(run_command([*command, *written_to(tmp_path / "on_device")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the process that is started
    passed(run_command([*command, *written_to(tmp_path / "on_cpu")]))
    on_device, on_cpu = (
        CheckpointRecord.read(tmp_path / name / "final").training
        for name in ("on_device", "on_cpu")
    )
    (start,) = events(tmp_path / "on_device" / "log", "start")
    assert start["device"].startswith(device.type)
    baselines = [found["baselines"]["test"]["logistic regression"] for found in (on_device, on_cpu)]
    assert baselines[0]["log_loss"] == pytest.approx(baselines[1]["log_loss"], abs=1e-6)
    losses = [found["metrics"]["test"]["log_loss"] for found in (on_device, on_cpu)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


@pytest.mark.parametrize(
    "speed", ["--amp", "--allow_tf32", "--table_precision=fp16", "--table_precision=fp16 --amp"]
)
def test_faster_arithmetic_trains_alike(device, data: Path, tmp_path: Path, speed: str) -> None:
    """bfloat16 has 8 bits, TF32 has 10: the losses of a batch of 32 rows are near."""
    found = train_losses(data, tmp_path, *ADAGRAD, *speed.split())
    difference = np.abs(np.subtract(found, reference_losses(data, *ADAGRAD)))
    assert difference[0] < 0.02  # before anything was trained
    assert difference.mean() < 0.03


@pytest.mark.parametrize("dense", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", [torch.float32, torch.bfloat16])
def test_the_kernel_joins_vectors(device, dense, vectors, caplog) -> None:
    parts = [torch.randn(2_000, 128), torch.randn(2_000, 26, 128), torch.randn(2_000, 1, 128)]
    for index, dtype in enumerate((dense, vectors, torch.float32)):
        parts[index] = parts[index].to(device, dtype)
    factors, coordinates = torch.full((128,), 3.0), torch.zeros(27, dtype=torch.int32)
    factors[0] = 0
    join = VectorJoin()
    rest = torch.randn(2_000, 1, device=device), factors.to(device), coordinates.to(device)
    join(*parts, *rest, 4)
    if device.type == "cuda":
        assert join.uses_kernel, caplog.text


@pytest.mark.parametrize("flags", [["--dense_bins=8"], ["--first_order=0", "--dense_bins=0"]])
def test_lookups_in_bfloat16(device, data: Path, tmp_path: Path, monkeypatch, flags) -> None:
    """As those in float32, which the model rounds; with a linear term by a rounding more."""
    rounded = [build.round_lookups]

    def round_lookups(*inputs) -> bool:
        rounded.append(rounded[0](*inputs))
        return rounded[-1]

    flags = [*MODEL, "--amp", "--adagrad", "--learning_rate=0.02", "--sharding=table_wise", *flags]
    monkeypatch.setattr(build, "round_lookups", round_lookups)
    found = train_losses(data, tmp_path / "bf16", *flags)
    assert rounded[1:] == [device.type == "cuda"]
    monkeypatch.setattr(build, "round_lookups", lambda *_: False)
    expected = train_losses(data, tmp_path / "fp32", *flags)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "flags",
    [[], ["--amp"], ["--interaction_type=dcn", "--dcn_num_layers=2", "--dcn_low_rank_dim=4"]],
    ids=" ".join,
)
def test_replays_train_as_launches(
    device, data: Path, tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense layers that are compiled are replayed as CUDA graphs."""
    torch.compiler.reset()  # it compiles a function eight times in a process
    launched = train_losses(data, tmp_path / "launched", *ADAGRAD, *flags)
    replay, replays = torch.cuda.CUDAGraph.replay, []
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph)
    )
    replayed = train_losses(data, tmp_path / "replayed", *ADAGRAD, *flags, "--compile_dense")
    assert bool(replays) == (device.type == "cuda")
    difference = np.abs(np.subtract(replayed, launched))
    assert difference.mean() < 0.02 if "--amp" in flags else difference.max() < 1e-3
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
    flags = [*ADAGRAD, *(LARGE if device.type == "cuda" else LARGE[:1])]
    found = train_losses(data, tmp_path, *flags)
    np.testing.assert_allclose(found, reference_losses(data, *flags), rtol=0, atol=1e-3)
    if device.type == "cuda":
        (start,) = events(tmp_path / "log", "start")
        kernels = {table["table"]: table["kernel"] for table in start["plan"]["tables"]}
        assert kernels["t_cat_2"] == "fused_uvm_caching"


@pytest.mark.parametrize("flag", ["--sharding=table_wise", "--sharding=row_wise"])
def test_two_gpus_train_as_one(device, data: Path, tmp_path: Path, flag: str) -> None:
    """Under NCCL, also on the last step of an epoch, where rank 0 has no row."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    run = small_run(data, tmp_path, *ADAGRAD, flag, batch_size=16)
    passed(torchrun("train_torchrec.py", *MODEL, *run))
    expected = reference_losses(data, *ADAGRAD)
    np.testing.assert_allclose(losses(tmp_path / "log"), expected, rtol=0, atol=1e-3)


def test_checkpoints_both_ways(device, data: Path, tmp_path: Path, monkeypatch) -> None:
    """Written on the GPU: scores alike on the CPU. Written on the CPU: tests alike on the GPU."""
    train_losses(data, tmp_path, *ADAGRAD)
    batch = next(iter(KJTLoader(data / "test", 201, device="cpu")))
    logits = []
    for place in ("cpu", device):
        model = model_of(tmp_path / "final").to(place)
        moved = batch.to(torch.device(place))
        logits.append(model(moved.dense_features, moved.sparse_features).cpu())
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that are started
    other = tmp_path / "cpu"
    passed(run_command(train_script(*small_run(data, other, *ADAGRAD))))
    record = CheckpointRecord.read(other / "final").training["metrics"]["test"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    load = [f"--load_checkpoint_path={other / 'final'}", f"--log_path={tmp_path / 'test_log'}"]
    result = train_here(f"--binary_path={data}", "--batch_size=32", "--mode=test", *load)
    assert result.metrics["test"]["log_loss"] == pytest.approx(record["log_loss"], abs=1e-5)
    assert result.metrics["test"]["auroc"] == pytest.approx(record["auroc"], abs=1e-4)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_goes_on_after_a_checkpoint(device, data: Path, tmp_path: Path, optimizer: str) -> None:
    """Weights, optimizer state and the loader's place: the rest is as if nothing had happened.

    FBGEMM's Adam would count its steps from 0 again.
    """
    _skip_adam(device, optimizer)
    flags = [*EXAMPLE, f"--optimizer={optimizer}", "--learning_rate=0.05", "--epochs=2"]
    flags.append("--shuffle_training_set")
    whole = train_losses(data, tmp_path / "whole", *flags)
    where = [f"--checkpoint_dir={tmp_path / 'run'}", "--checkpoint_freq=20"]
    train_losses(data, tmp_path / "first", *flags, *where, "--max_steps=20")
    rest = train_losses(data, tmp_path / "rest", *flags, *where, "--resume")
    np.testing.assert_allclose(rest, whole[20:], rtol=0, atol=1e-5)


def test_an_evaluation_before_the_first_step_changes_no_step(device, data, tmp_path) -> None:
    """Of Adam, whose state is made for it; the rate is too high, and no step is kept."""
    _skip_adam(device, "adam")
    flags = [*EXAMPLE, "--optimizer=adam", "--learning_rate=1"]
    plain = train_losses(data, tmp_path / "plain", *flags)
    early = train_losses(data, tmp_path / "early", *flags, "--early_stopping=99")
    np.testing.assert_allclose(early, plain, rtol=0, atol=1e-5)
    assert CheckpointRecord.read(tmp_path / "early" / "final").training["steps"] == 0
