"""What flags change in a run: model, precision, data, when it stops, what it writes on the way."""

from __future__ import annotations

import gzip
import json
import logging

import numpy as np
import pytest
import torch
from torchrec.models.dlrm import InteractionArch

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.layers import PairProducts
from nvt_torchrec.models.metrics import compute_metrics
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.settings.train_settings import fill_sizes, parse_settings
from nvt_torchrec.training.sharding.model_config import model_config
from tests.training.runs import (
    EXAMPLE_SGD,
    MODELS,
    config_of,
    events,
    losses,
    model_of,
    score,
    train_here,
)


def _train(data, log, *flags: str):
    run = [*EXAMPLE_SGD, f"--binary_path={data}", "--batch_size=32", "--learning_rate=0.1"]
    return train_here(*run, *flags, f"--log_path={log}")


def _log_loss(checkpoint, data) -> float:
    """Of the test set, by the model of a checkpoint in one process."""
    sizes = config_of(checkpoint).num_embeddings
    loader = KJTLoader(data / "test", 64, device="cpu", table_sizes=sizes)
    return compute_metrics(*score(model_of(checkpoint), loader)).log_loss


@pytest.mark.parametrize("rows", [5, 0])
def test_the_interaction_is_torchrecs(rows):
    torch.manual_seed(0)
    dense = torch.randn(rows, 4, requires_grad=True)
    sparse = torch.randn(rows, 3, 4, requires_grad=True)
    ours, theirs = PairProducts(4)(dense, sparse), InteractionArch(3)(dense, sparse)
    assert torch.equal(ours, theirs)
    weights = torch.randn_like(ours)
    gradients = torch.autograd.grad((ours * weights).sum(), (dense, sparse))
    expected = torch.autograd.grad((theirs * weights).sum(), (dense, sparse))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name]])
def test_another_model_is_trained_kept_and_loaded(name, data, tmp_path):
    result = _train(data, tmp_path, *MODELS[name], f"--save_checkpoint_path={tmp_path / 'c'}")
    _train(data, tmp_path / "plain")
    plain = events(tmp_path / "plain", "evaluation")[-1]
    assert result.metrics["test"]["log_loss"] != plain["log_loss"]
    assert losses(tmp_path)[-2] < losses(tmp_path)[0]
    assert _log_loss(tmp_path / "c", data) == pytest.approx(
        result.metrics["test"]["log_loss"], abs=1e-5
    )


def test_bfloat16_is_close_and_keeps_float32_weights(data, tmp_path):
    _train(data, tmp_path / "a")
    _train(data, tmp_path / "b", "--amp", f"--save_checkpoint_path={tmp_path / 'c'}")
    a, b = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert np.abs(np.subtract(a, b)).max() > 1e-5
    np.testing.assert_allclose(a, b, rtol=0, atol=0.02)
    model = model_of(tmp_path / "c")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_max_steps_in_the_second_epoch(data, tmp_path):
    flags = ["--epochs=3", "--max_steps=40", "--change_lr", "--lr_change_point=0.5"]
    result = _train(data, tmp_path, *flags, "--lr_after_change_point=0.01")
    assert (result.steps, result.samples) == (40, 929 + 10 * 32)
    rates = [event["lr"] for event in events(tmp_path, "train")]
    assert rates == [0.1] * 20 + [0.01] * 20, "shares are of the steps that are trained"
    evaluated = [(event["step"], event["split"]) for event in events(tmp_path, "evaluation")]
    assert evaluated == [(30, "valid"), (40, "valid"), (40, "test")]


def test_batch_size_of_evaluations(data, tmp_path):
    a = _train(data, tmp_path / "a", "--limit_val_batches=2")
    b = _train(data, tmp_path / "b", "--limit_val_batches=2", "--test_batch_size=100")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert (a.metrics["valid"]["samples"], b.metrics["valid"]["samples"]) == (64, 200)
    assert a.metrics["test"]["auroc"] == pytest.approx(b.metrics["test"]["auroc"], abs=1e-6)


def test_warm_up_steps_are_left_out_of_the_throughput(data, tmp_path):
    flags = ["--throughput_check_freq_within_epoch=20", "--benchmark_warmup_steps=7"]
    _train(data, tmp_path, *flags)
    trained = events(tmp_path, "train")
    assert [one["step"] for one in trained] == [7, 20, 30]
    (end,) = events(tmp_path, "end")
    timed = trained[-1]["train_seconds"] - trained[0]["train_seconds"]
    assert end["samples_per_s"] == pytest.approx((929 - 7 * 32) / timed)


def test_a_line_of_progress(data, tmp_path, caplog):
    flags = ["--max_steps=4", "--throughput_check_freq_within_epoch=4", "--lr_warmup_steps=8"]
    with caplog.at_level(logging.INFO, logger="nvt_torchrec.training"):
        _train(data, tmp_path, *flags)
    (line,) = [r.getMessage() for r in caplog.records if "  epoch " in r.getMessage()]
    assert line.startswith("step 4/4  epoch 1/1 13 %  loss 0.")
    for part in ("  lr 0.05  ", "samples/s (", " per rank)  data ", " %  memory ", " GiB  ETA 0:0"):
        assert part in line


def test_profile(data, tmp_path):
    _train(data, tmp_path, "--profile", "--benchmark_warmup_steps=4")
    trace = json.loads(gzip.decompress((tmp_path / "profile.json.gz").read_bytes()))
    steps = {one["name"] for one in trace["traceEvents"] if "ProfilerStep" in one.get("name", "")}
    assert steps == {f"ProfilerStep#{step}" for step in range(6, 16)}
    assert "embedding" in (tmp_path / "profile.txt").read_text()
    with pytest.raises(SettingsError, match="too few to profile 10 after the first 2"):
        _train(data, tmp_path / "b", "--profile", "--max_steps=11")


def test_every_run_leaves_a_log(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [f"--binary_path={data}", "--max_steps=3"]
    train_here(*flags)
    (directory,) = (tmp_path / "training_log").iterdir()
    names = {"metrics.jsonl", "settings.json", "training.html"}
    assert {path.name for path in directory.iterdir()} == names
    assert json.loads((directory / "settings.json").read_text())["max_steps"] == 3
    train_here(*flags, "--checkpoint_dir=kept", "--checkpoint_freq=2")
    assert {path.name for path in (tmp_path / "kept" / "log").iterdir()} == names


def test_dense_layers_are_compiled(data, tmp_path, inductor):
    _train(data, tmp_path / "a", "--max_steps=3")
    assert not inductor
    _train(data, tmp_path / "b", "--max_steps=3", "--compile_dense")
    assert inductor
    np.testing.assert_allclose(losses(tmp_path / "a"), losses(tmp_path / "b"), rtol=0, atol=1e-6)


def test_limits(data, tmp_path):
    _train(data, tmp_path / "all")
    flags = ["--limit_train_batches=5", "--limit_val_batches=3", "--limit_test_batches=2"]
    result = _train(data, tmp_path / "few", *flags)
    assert (result.steps, result.samples) == (5, 160)
    assert result.metrics["valid"]["samples"] == 96
    assert result.metrics["test"]["samples"] == 64
    assert losses(tmp_path / "few") == losses(tmp_path / "all")[:5]


def test_drop_last_training_batch(data, tmp_path):
    result = _train(data, tmp_path, "--drop_last_training_batch")
    assert (result.steps, result.samples) == (29, 928)
    assert result.metrics["test"]["samples"] == 201, "evaluation drops nothing"


def test_undersampling_keeps_every_positive(data, tmp_path):
    labels = np.concatenate(
        [batch.labels.numpy() for batch in KJTLoader(data / "train", 64, device="cpu")]
    )
    result = _train(data, tmp_path, "--undersampling_rate=0.3")
    positives, negatives = int(labels.sum()), int((1 - labels).sum())
    assert positives + 0.15 * negatives < result.samples < positives + 0.45 * negatives


def test_sizes_that_count_values_are_raised(data, caplog):
    """By no more than the reserved ids."""

    def sizes(text: str, *flags: str) -> tuple[int, ...]:
        settings = parse_settings([f"--num_embeddings_per_feature={text}", *flags])
        return model_config(fill_sizes(settings, 0, 1), TableSchema.read(data)).num_embeddings

    caplog.set_level("INFO", "nvt_torchrec")
    assert sizes("7,47,199,1") == (10, 50, 200, 3)
    assert "cat_0 7 → 10, cat_1 47 → 50, cat_2 199 → 200, cat_3 1 → 3" in caplog.text
    with pytest.raises(SettingsError, match=r"small: column cat_1 needs 50 .* 46\n"):
        sizes("7,46,200,1")
