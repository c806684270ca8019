"""Training runs end to end, by one rank and by two; test_plans.py has them beside plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics as sklearn

import train_torchrec
from nvt_torchrec.base.errors import BadInputError, OutputError, SettingsError
from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader.data import write_split
from tests.shell import free_port
from tests.training.runs import (
    EXAMPLE,
    EXAMPLE_SGD,
    MODEL,
    ROOT,
    config_of,
    events,
    losses,
    model_of,
    passed,
    run_command,
    score,
    small_run,
    torchrun,
    train_here,
    train_losses,
    train_many,
)

STEPS = 30  # of an epoch of the fixture's 929 rows in global batches of 32; the last has one row

SGD = [*EXAMPLE_SGD, "--epochs=2", "--learning_rate=0.3"]
SGD += ["--change_lr", "--lr_change_point=0.7", "--lr_after_change_point=0.03"]
ADAGRAD = [*EXAMPLE, "--epochs=2", "--learning_rate=0.1", "--adagrad", "--seed=5"]
ADAGRAD += ["--first_order=0.5", "--dense_bins=4"]


@pytest.fixture(scope="module", params=[SGD, ADAGRAD], ids=["sgd", "adagrad"])
def flags(request) -> list[str]:
    return request.param


@pytest.fixture(scope="module")
def one_rank(flags, data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("one")
    train_here(*small_run(data, path, *flags))
    return path


@pytest.fixture(scope="module")
def two_ranks(flags, data, tmp_path_factory) -> Path:
    """The same run on two ranks, by the README's torchx, on one machine or on two."""
    path = tmp_path_factory.mktemp("two")
    flags = [*{flag.partition("=")[0]: flag for flag in flags}.values()]  # torchx wants each once
    machines = f"-j 2x1 --rdzv_port {free_port()}" if "--adagrad" in flags else "-j 1x2"
    torchx = f"torchx run -s local_cwd dist.ddp {machines} --script train_torchrec.py --"
    run = [*MODEL, *small_run(data, path, *flags, batch_size=16)]
    passed(run_command([*torchx.split(), *run], cwd=ROOT))
    return path


def test_two_ranks_train_as_one(one_rank, two_ranks):
    """Also on the last step of an epoch, where rank 0 has no row."""
    one, two = (losses(path / "log") for path in (one_rank, two_ranks))
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)


def test_events(two_ranks, flags):
    log = two_ranks / "log"
    trained = events(log, "train")
    assert [event["step"] for event in trained] == list(range(1, 2 * STEPS + 1))
    assert trained[STEPS - 2]["samples"] == 928
    assert trained[STEPS - 1]["samples"] == 929
    assert trained[-1]["samples"] == 2 * 929
    assert trained[-1]["epoch"] == 2.0
    assert all(0 <= event["data_wait"] <= 1 for event in trained)
    assert all(event["samples_per_s"] > 0 for event in trained)
    if "--change_lr" in flags:
        assert [event["lr"] for event in trained[:42]] == [0.3] * 42
        assert [event["lr"] for event in trained[42:]] == [0.03] * 18
    splits = [(event["split"], event["epoch"]) for event in events(log, "evaluation")]
    assert splits == [("valid", 1.0), ("valid", 2.0), ("test", 2.0)]
    (start,) = events(log, "start")
    assert start["model"]["num_embeddings"] == [10, 50, 200, 3]
    (end,) = events(log, "end")
    assert end["checkpoint"] == str(two_ranks / "final")


def test_checkpoint_of_two_ranks_predicts_as_their_evaluation(two_ranks, data):
    model, config = model_of(two_ranks / "final"), config_of(two_ranks / "final")
    assert config.num_embeddings == (10, 50, 200, 3)
    assert config.categorical == ("cat_0", "cat_1", "cat_2", "cat_3")
    for event in events(two_ranks / "log", "evaluation")[-2:]:
        logits, labels = score(model, KJTLoader(data / event["split"], 64, device="cpu"))
        assert len(labels) == event["samples"]
        probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
        auroc = sklearn.roc_auc_score(labels, logits)
        assert event["auroc"] == pytest.approx(auroc, abs=1e-6)
        assert event["log_loss"] == pytest.approx(sklearn.log_loss(labels, probabilities), abs=1e-6)
        assert event["mean_prediction"] == pytest.approx(probabilities.mean(), abs=1e-6)
        assert event["accuracy"] == sklearn.accuracy_score(labels, logits >= 0)


def test_evaluating_on_the_way_does_not_disturb_training(data, tmp_path):
    flags = [*EXAMPLE_SGD, "--learning_rate=0.3", "--epochs=2", "--shuffle_training_set"]
    seldom = train_losses(data, tmp_path / "a", *flags)
    assert train_losses(data, tmp_path / "b", *flags, "--validation_freq_within_epoch=7") == seldom
    assert events(tmp_path / "a" / "log", "train")[-1]["samples"] == 2 * 929
    evaluations = events(tmp_path / "b" / "log", "evaluation")
    assert [event["step"] for event in evaluations] == [7, 14, 21, 28, 30, 37, 44, 51, 58, 60, 60]
    assert {event["samples"] for event in evaluations[:-1]} == {333}
    ends = [events(tmp_path / run / "log", "evaluation")[-1] for run in "ab"]
    for end in ends:
        del end["seconds"]
    assert ends[0] == ends[1]


def test_shuffling_and_seed(data, tmp_path):
    def curve(name: str, *flags: str) -> list[float]:
        return train_losses(data, tmp_path / name, *EXAMPLE_SGD, "--learning_rate=0.1", *flags)

    plain = curve("plain")
    assert curve("again") == plain
    assert curve("seed", "--seed=1") != plain
    shuffled = curve("shuffled", "--shuffle_training_set")
    assert shuffled[0] != plain[0]
    assert curve("shuffled_again", "--shuffle_training_set") == shuffled


def test_merlins_loader_trains_as_ours(data, tmp_path, monkeypatch):
    """In the order of the files, which is ours with one virtual shard."""
    merlin = train_losses(data, tmp_path / "merlin", *ADAGRAD, "--loader=merlin")
    monkeypatch.setattr("nvt_torchrec.nvt_loader.loader.choose_virtual_shards", lambda _: 1)
    assert merlin == train_losses(data, tmp_path / "ours", *ADAGRAD)


def test_merlins_loader_on_more_ranks_than_partitions(tmp_path):
    """A rank that never has a row takes all steps, and changes nothing."""
    split = tmp_path / "split"
    write_split(split, {"train": [530], "valid": [40], "test": [40]}, row_group_rows=1000)
    flags = [*ADAGRAD, "--loader=merlin"]
    one = train_losses(split, tmp_path / "one", *flags)
    train_many([small_run(split, tmp_path / "two", *flags)], ranks=2)
    np.testing.assert_allclose(losses(tmp_path / "two" / "log"), one, rtol=0, atol=1e-5)


def test_reports_every_interval_and_at_the_end_of_an_epoch(data, tmp_path):
    flags = [*EXAMPLE_SGD, "--learning_rate=0.1", "--epochs=2"]
    each = train_losses(data, tmp_path / "each", *flags)
    train_losses(data, tmp_path / "some", *flags, "--throughput_check_freq_within_epoch=20")
    some = events(tmp_path / "some" / "log", "train")
    assert [event["step"] for event in some] == [20, 30, 50, 60]
    assert some[0]["loss"] == pytest.approx(np.mean(each[:20]), abs=1e-6)
    weights = [32] * 9 + [1]  # of samples, not of steps
    assert some[1]["loss"] == pytest.approx(np.average(each[20:30], weights=weights), abs=1e-6)


def test_a_run_stops_at_the_auroc_that_is_enough(learnable, tmp_path):
    """After the first evaluation of valid that has it."""
    flags = ["--stop_at_auroc=0.7", "--batch_size=512", "--validation_freq_within_epoch=4"]
    rate = [*EXAMPLE, "--learning_rate=0.005", "--adagrad", "--epochs=9"]
    result = train_here(f"--binary_path={learnable}", *rate, *flags, f"--log_path={tmp_path}")
    *before, reached, last = [e for e in events(tmp_path, "evaluation") if e["split"] == "valid"]
    assert before
    assert max(event["auroc"] for event in before) < 0.7 <= reached["auroc"]
    assert result.steps == reached["step"] == last["step"] < 9 * 32


def test_divergence_stops_the_run(data, tmp_path):
    saved = f"--save_checkpoint_path={tmp_path / 'c'}"
    with pytest.raises(SettingsError, match=r"the loss is nan between .*\n.*--learning_rate"):
        train_here(f"--binary_path={data}", *EXAMPLE_SGD, "--learning_rate=1e30", saved)
    assert not list(tmp_path.iterdir())


def test_divergence_in_the_last_step_is_noticed_by_the_evaluation(data):
    """The loss of a step is computed before its update."""
    with pytest.raises(SettingsError, match="of 333 predictions are not finite"):
        train_here(
            f"--binary_path={data}", *EXAMPLE_SGD, "--learning_rate=1e38", "--batch_size=1024"
        )


def test_no_training_rows(tmp_path):
    write_split(tmp_path, {"train": [0], "valid": [3], "test": [3]})
    with pytest.raises(BadInputError, match="no rows to train on"):
        train_here(f"--binary_path={tmp_path}")


def test_empty_valid_and_test_sets(tmp_path):
    write_split(tmp_path, {"train": [70], "valid": [0], "test": [0]})
    result = train_here(f"--binary_path={tmp_path}", "--epochs=1")
    assert result.metrics["test"]["samples"] == 0
    assert result.metrics["test"]["auroc"] is None


def test_a_checkpoint_is_never_overwritten(data, one_rank, flags, monkeypatch):
    """It is found before training, not after."""
    # the first thing a step calls
    monkeypatch.setattr("nvt_torchrec.training.loop.train_steps.set_learning_rate", None)
    same = small_run(data, one_rank, *flags)
    before = (one_rank / "final" / "model.json").read_bytes()
    for other in (small_run(data, one_rank), [*same, "--max_steps=60"]):
        with pytest.raises(OutputError, match="already holds a checkpoint"):
            train_here(*other)
    assert train_here(*same).steps == 2 * STEPS, "asked again, it is done already"
    assert (one_rank / "final" / "model.json").read_bytes() == before


def test_the_result_as_json(data, tmp_path, capsys):
    """One object on standard output, also of a run that was done before, or resumes."""
    steps = [f"--checkpoint_dir={tmp_path / 'steps'}", "--checkpoint_freq=4", "--resume"]
    flags = [*MODEL, *small_run(data, tmp_path, *steps, "--json")]

    def result(name: str, steps: int) -> dict:
        path = tmp_path / name
        command = [*flags, f"--save_checkpoint_path={path}", f"--max_steps={steps}"]
        assert train_torchrec.main(command) == 0
        value = json.loads(capsys.readouterr().out)
        assert (value["checkpoint"], value["steps"]) == (str(path), steps)
        assert value["metrics"]["test"]["samples"] == 201
        assert value["baselines"]["test"]["logistic regression"]["samples"] == 201
        return value

    first = result("a", 4)
    assert first["status"] == "done"
    again = {**first, "status": "already done", "train_seconds": 0.0}
    assert result("a", 4) == again
    assert result("b", 8)["status"] == "continued"


def test_user_error_is_told_once(data):
    result = torchrun("train_torchrec.py", *MODEL, f"--binary_path={data}", "--num_embeddings=100")
    assert result.returncode != 0
    assert result.stderr.count("error: --num_embeddings: table too small: column cat_2") == 1


def test_tables_that_do_not_fit_into_memory(data):
    wide = ["--embedding_dim=512", "--dense_arch_layer_sizes=512"]
    with pytest.raises(SettingsError, match=r"the 4 tables \(15258\.8 GiB of weights\) do not fit"):
        train_here(f"--binary_path={data}", "--num_embeddings=2000000000", *wide)
