"""Interrupted runs go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nvt_torchrec.base.errors import OutputError, SchemaError, SettingsError
from nvt_torchrec.models.checkpoint.record import FORMAT, CheckpointRecord
from nvt_torchrec.training.checkpoint.directories import list_complete
from nvt_torchrec.training.launch import distributed
from nvt_torchrec.training.loop import trainer
from nvt_torchrec.training.loop.evaluate import evaluate
from nvt_torchrec.training.loop.finish import fit_bias
from tests.nvt_loader.data import write_metadata, write_split
from tests.training.conftest import TABLE_SIZES
from tests.training.generations import DIGESTS, write_workflow
from tests.training.runs import (
    EXAMPLE_SGD,
    MODEL,
    STEPS,
    adagrad_flags,
    assert_same,
    early_flags,
    events,
    flags_of,
    losses,
    passed,
    resumed_step,
    run_command,
    train_here,
    train_losses,
    train_script,
    train_until_pulled,
    two_machines,
    weights,
)

#: Just after an epoch, the last step, and one at random.
INTERRUPTED_AT = [31, 89, int(np.random.default_rng(5).integers(8, 89))]


@pytest.mark.parametrize("step", INTERRUPTED_AT)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(data, whole, tmp_path, monkeypatch, step):
    """Also over the end of an epoch, where the loader's state is the next one's beginning."""
    train_until_pulled(monkeypatch, step, *flags_of(data, tmp_path))
    result = train_here(*flags_of(data, tmp_path), "--resume", "--validation_freq_within_epoch=11")
    resumed = resumed_step(tmp_path)
    assert resumed == step - step % 7
    assert result.steps == STEPS
    assert result.samples == 3 * 929
    assert_same(tmp_path / "final", whole / "final")
    expected = losses(whole / "log")
    assert losses(tmp_path / "log")[-(STEPS - resumed) :] == expected[resumed:]


def test_a_run_that_stops_early_resumes_bitwise_to_its_best_model(
    data, two_ranks, tmp_path, monkeypatch
):
    """In its first evaluation, and after the best one, which only the checkpoints then know.

    Also on two ranks. In the middle of a schedule one is better by two nats over all rows. With the
    threads of a machine of two cores; other tests train with one.
    """
    monkeypatch.setattr(distributed, "count_cores", lambda: 2)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = train_here(*early_flags(data, whole))
    *tried, last = [e for e in events(whole / "log", "evaluation") if e["split"] == "valid"]
    best = tried[0]
    assert best["step"] == 0
    for event in tried:
        minimum = 0 if event["step"] in (30, 90, 210) else 2 / 333
        best = event if event["log_loss"] < best["log_loss"] - minimum else best
    assert result.steps == last["step"] == best["step"] == tried[-5]["step"]
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", _terminate_and_evaluate)
        with pytest.raises(SystemExit):
            train_here(*early_flags(data, broken))
    assert last["auroc"] == best["auroc"]  # the bias alone has changed
    record = CheckpointRecord.read(whole / "final").training
    assert (record["steps"], record["samples"]) == (best["step"], result.samples)
    flags = [*early_flags(data, broken), "--resume"]
    train_until_pulled(monkeypatch, tried[-1]["step"] - 2, *flags)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "fit_bias", _fit_bias_and_terminate)
        with pytest.raises(SystemExit):
            train_here(*flags)
    assert train_here(*flags).steps == result.steps
    begin, first, second = events(broken / "log", "resume")
    assert begin["step"] == 0
    assert first["step"] > best["step"] == second["step"]
    assert_same(whole / "final", broken / "final")
    assert CheckpointRecord.read(two_ranks / "early" / "final").training["steps"] == result.steps
    expected, found = (weights(path / "final") for path in (whole, two_ranks / "early"))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-4)


def _terminate_and_evaluate(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(*args)


def _fit_bias_and_terminate(*args) -> None:
    """Get SIGTERM when the model is finished, which the last checkpoint then is."""
    fit_bias(*args)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_killed_rank_brings_the_job_back(data, two_ranks, tmp_path):
    """On two machines, SIGKILL for a rank at a random step: both are started again and go on."""
    step = str(np.random.default_rng(7).integers(9, 29))
    flags = [*MODEL, *adagrad_flags(data, tmp_path, batch_size=16), "--resume"]
    command = ["tests/training/disturbed.py", "killed", step, str(tmp_path / "places"), *flags]
    for result in two_machines(*command, launcher=["--max-restarts=1"]):
        passed(result)
    for place in (tmp_path / "places").iterdir():
        assert len({line.split()[0] for line in place.read_text().splitlines()}) == 2, "processes"
    assert len(events(tmp_path / "log", "resume")) == 1
    assert_same(tmp_path / "final", two_ranks / "adagrad" / "final")


def test_from_one_rank_to_two(whole, two_ranks):
    assert resumed_step(two_ranks / "wider") == 28
    expected = losses(whole / "log")[28:]
    assert len(expected) > 50
    np.testing.assert_allclose(losses(two_ranks / "wider" / "log"), expected, rtol=0, atol=1e-5)


def test_from_two_ranks_to_one(data, two_ranks, tmp_path):
    """The losses are those of the ranks that would have gone on."""
    shutil.copytree(two_ranks / "adagrad" / "steps", tmp_path / "steps")
    assert CheckpointRecord.read(list_complete(tmp_path / "steps")[-1]).world_size == 2
    for path in list_complete(tmp_path / "steps")[1:]:
        shutil.rmtree(path)
    train_here(*adagrad_flags(data, tmp_path), "--resume")
    expected = losses(two_ranks / "adagrad" / "log")[resumed_step(tmp_path) :]
    assert len(expected) > 10
    np.testing.assert_allclose(losses(tmp_path / "log"), expected, rtol=0, atol=1e-5)


def test_a_directory_with_a_run_is_not_taken_over_silently(data, started):
    with pytest.raises(OutputError, match=r"holds a run, up to step_00000084\n.*--resume"):
        train_here(*flags_of(data, started))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--seed=3", "seed was 0, is 3"),
        ("--eps=1e-6", "eps was 1e-08, is 1e-06"),
        ("--drop_last_training_batch", "drop_last_training_batch was False, is True"),
        ("--limit_train_batches=20", "limit_train_batches was None, is 20"),
        ("--hash_indices", "hash_indices was False, is True"),
        ("--undersampling_rate=0.5", "undersampling_rate was None, is 0.5"),
        ("--embedding_l2=0.1", "embedding_l2 was 0.0, is 0.1"),
        ("--weight_decay=0.1", "weight_decay was 0.0, is 0.1"),
        ("--stop_by=auroc", "stop_by was log_loss, is auroc"),
        ("--batch_size=64", "global_batch = 64, but 32"),
    ],
)
def test_other_settings_are_refused_with_the_difference(data, started, flag, message):
    with pytest.raises((SettingsError, SchemaError), match=message):
        train_here(*flags_of(data, started, flag), "--resume")


def test_another_optimizer_is_refused_but_not_another_name_of_it(data, started):
    flags = [flag for flag in flags_of(data, started) if flag != "--adagrad"]
    with pytest.raises(SettingsError, match="optimizer was rowwise_adagrad, is sgd"):
        train_here(*flags, "--resume", "--optimizer=sgd")
    train_here(*flags, "--resume")  # the checkpoint's


def test_other_data_are_refused(started, tmp_path):
    other = tmp_path / "split"
    rows = {"train": [600, 320, 10, 0], "valid": [333], "test": [201]}
    write_split(other, rows, table_sizes=TABLE_SIZES, dense=3)
    with pytest.raises(SchemaError, match="rows 929 → 930"):
        train_here(*flags_of(other, started), "--resume")


def test_a_schedule_may_change(data, started):
    schedule = ["--lr_warmup_steps=5", "--lr_decay_start=80", "--lr_decay_steps=9"]
    train_here(*flags_of(data, started), "--resume", *schedule)
    assert events(started / "log", "train")[-1]["lr"] < 0.01


def _moved(data: Path, path: Path) -> Path:
    """The splits, without the workflow that may lie beside the original."""
    return Path(shutil.copytree(data, path / "elsewhere" / "split"))


def test_data_that_moved_without_their_workflow(data, whole, tmp_path, monkeypatch):
    """What the checkpoints say of the workflow stays known to those that follow."""
    first = _moved(data, tmp_path)
    write_workflow(first.parents[1] / "workflow", 0)
    train_until_pulled(monkeypatch, 20, *flags_of(first, tmp_path))
    (resumed,) = list_complete(tmp_path / "steps")[-1:]
    assert CheckpointRecord.read(resumed).training["workflow_digest"] == DIGESTS[0]
    second = first.rename(tmp_path / "split")
    train_here(*flags_of(second, tmp_path), "--resume")
    assert_same(tmp_path / "final", whole / "final")
    assert CheckpointRecord.read(tmp_path / "final").training["workflow_digest"] == DIGESTS[0]


def test_another_workflow_is_refused(data, started):
    (path,) = list_complete(started / "steps")[-1:]
    value = json.loads((path / "model.json").read_text())
    value["training"]["workflow_digest"] = "another"
    (path / "model.json").write_text(json.dumps(value | {"blake2b": FORMAT.digest(value)}))
    split = _moved(data, started)
    write_workflow(split.parents[1] / "workflow", 0)
    with pytest.raises(
        SchemaError, match=f"data of workflow another, but this run has {DIGESTS[0]}"
    ):
        train_here(*flags_of(split, started), "--resume")


def test_other_values_in_files_of_the_same_shape_are_refused(data, tmp_path, monkeypatch):
    """Same names, sizes, rows and row groups: only what the columns hold tells them apart."""
    split = _moved(data, tmp_path)
    _rewrite(split, 1)
    sizes = [path.stat().st_size for path in sorted(split.rglob("*.parquet"))]
    train_until_pulled(monkeypatch, 20, *flags_of(split, tmp_path))
    _rewrite(split, -2)
    assert [path.stat().st_size for path in sorted(split.rglob("*.parquet"))] == sizes
    with pytest.raises(SchemaError, match="trained on data with statistics "):
        train_here(*flags_of(split, tmp_path), "--resume")


def _rewrite(split: Path, factor: float) -> None:
    for path in split.rglob("part.*.parquet"):
        table = pq.read_table(path)
        column = pa.array(table["int_1"].to_numpy() * np.float32(factor))
        table = table.set_column(2, table.schema.field("int_1"), column)
        pq.write_table(table, path, compression="none", use_dictionary=False)
    write_metadata(split)


def test_half_written_checkpoints_are_never_resumed_from_and_removed(data, started):
    newest = list_complete(started / "steps")[-1]
    newest.rename(newest.with_name(".step_00000084.tmp"))  # killed before the rename
    shutil.copytree(newest.with_name(".step_00000084.tmp"), started / "steps" / ".step_1.old.tmp")
    train_here(*flags_of(data, started), "--resume")
    assert resumed_step(started) == 77
    assert not list((started / "steps").glob(".*"))


def test_a_full_disk_stops_training_and_keeps_what_was_written(data, started):
    """A real one, as far as a process can tell: no file may grow beyond 16 KiB."""
    for path in list_complete(started / "steps")[1:]:
        shutil.rmtree(path)
    train = shlex.join(train_script(*flags_of(data, started), "--resume"))
    result = run_command(["bash", "-c", f"ulimit -f 16; {train}"])
    assert result.returncode == 2, result.stderr
    assert "error: " in result.stderr
    assert "step_00000077: the checkpoint cannot be written: " in result.stderr
    assert [path.name for path in (started / "steps").iterdir() if path.name != "latest"] == [
        "step_00000070"
    ]


def test_without_a_frequency_checkpoints_are_written_at_each_evaluation(data, tmp_path):
    flags = [f"--binary_path={data}", "--batch_size=32", "--validation_freq_within_epoch=8"]
    train_here(*flags, f"--checkpoint_dir={tmp_path}", "--keep=2")
    assert [path.name for path in list_complete(tmp_path)] == ["step_00000016", "step_00000024"]


def test_mode_test_evaluates_a_checkpoint(data, whole, tmp_path):
    final = events(whole / "log", "evaluation")[-1]
    load = f"--load_checkpoint_path={whole / 'final'}"
    result = train_here(f"--binary_path={data}", "--mode=test", load, "--batch_size=64")
    assert result.metrics["test"]["samples"] == final["samples"]
    assert result.metrics["test"]["auroc"] == final["auroc"]
    assert result.metrics["test"]["log_loss"] == pytest.approx(final["log_loss"], abs=1e-7)


def test_starting_from_the_weights_of_another_run(data, whole, tmp_path):
    rate = [*EXAMPLE_SGD, "--dense_bins=4", "--learning_rate=0.05"]
    load = f"--load_checkpoint_path={whole / 'final'}"
    warm = train_losses(data, tmp_path / "warm", *rate, load)
    assert warm[0] < train_losses(data, tmp_path / "fresh", *rate)[0] - 0.05
