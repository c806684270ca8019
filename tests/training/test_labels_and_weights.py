"""Training and evaluation on data with several labels and weights, by one rank and by two."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn import metrics as sklearn

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.data.loaders import TrainBatch
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.loop.train import train
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.train_model import _Losses, _scale_to_mean_1
from tests.nvt_loader.data import write_split
from tests.nvt_loader.weighted import write_weighted
from tests.training.reference import reference_losses
from tests.training.runs import (
    EXAMPLE,
    assert_same,
    events,
    losses,
    model_of,
    score,
    small_run,
    train_here,
    train_many,
    weights,
)

FLAGS = [*EXAMPLE, "--epochs=2", "--learning_rate=0.1"]
#: By label, so that there are runs of each kind.
OPTIMIZERS = {"label": "rowwise_adagrad", "liked": "sgd", "liked,label": "adagrad"}
#: What a run of two labels needs: one starts from their regressions.
TWO = ["--over_arch_layer_sizes=16,2", "--first_order=0.3"]
LABELS = tuple(OPTIMIZERS)


@pytest.fixture(scope="module")
def weighted(tmp_path_factory) -> Path:
    """Splits whose last training step has one row, on two ranks none on rank 0."""
    root = tmp_path_factory.mktemp("weighted") / "split"
    files = {"train": [300, 0, 117], "valid": [133], "test": [101]}
    write_weighted(root, files, table_sizes=(10, 50, 200))
    return root


def flags_of(
    data: Path, path: Path, *other: str, batch_size: int = 32, label: str = ""
) -> list[str]:
    flags = [*FLAGS, f"--optimizer={OPTIMIZERS[label or 'label']}"]
    if label:
        flags.append(f"--label={label}")
    if "," in label:
        flags += TWO
    return small_run(data, path, *flags, *other, batch_size=batch_size)


@pytest.fixture(scope="module")
def runs(weighted, tmp_path_factory) -> dict[tuple[int, str], Path]:
    """By ranks and label, runs that trained the same."""
    root = tmp_path_factory.mktemp("runs")
    paths = {(ranks, label): root / f"{ranks}{label}" for ranks in (1, 2) for label in LABELS}
    for label in LABELS:
        train_here(*flags_of(weighted, paths[1, label], label=label))
    two = [flags_of(weighted, paths[2, label], batch_size=16, label=label) for label in LABELS]
    train_many(two, ranks=2)
    return paths


@pytest.mark.parametrize("label", LABELS)
def test_one_rank_equals_plain_pytorch(runs, weighted, label):
    flags = flags_of(weighted, weighted, label=label)
    assert parse_settings(flags).label == label
    expected = reference_losses(weighted, *flags)
    np.testing.assert_allclose(losses(runs[1, label] / "log"), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("label", LABELS)
def test_two_ranks_train_as_one(runs, label):
    """Gradients are those of one rank with the whole batch, however its weights are spread."""
    one, two = runs[1, label], runs[2, label]
    np.testing.assert_allclose(losses(two / "log"), losses(one / "log"), rtol=0, atol=1e-5)
    mine, theirs = weights(two / "final"), weights(one / "final")
    for name, tensor in mine.items() if label == "liked" else ():  # SGD: sums of gradients
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluations_are_weighted(runs, weighted, label, ranks):
    run = runs[ranks, label]
    model = model_of(run / "final")
    names = label.split(",")
    last = events(run / "log", "evaluation")[-2 * len(names) :]
    found = [(event["split"], event.get("label", label)) for event in last]
    assert found == [(split, name) for split in ("valid", "test") for name in names]
    for event in last:
        loader = KJTLoader(weighted / event["split"], 64, device="cpu", label=names)
        scored = [values.reshape(-1, len(names)).T for values in score(model, loader)]
        logits, labels = (values[names.index(event.get("label", label))] for values in scored)
        w = torch.cat([batch.weights for batch in loader]).numpy().astype(np.float64)
        p = 1 / (1 + np.exp(-logits.astype(np.float64)))
        assert event["samples"] == len(labels)
        assert event["positives"] == np.count_nonzero(labels)
        assert event["total_weight"] == pytest.approx(w.sum())
        expected = {
            "auroc": sklearn.roc_auc_score(labels, logits, sample_weight=w),
            "log_loss": sklearn.log_loss(labels, p, sample_weight=w),
            "accuracy": sklearn.accuracy_score(labels, logits >= 0, sample_weight=w),
            "calibration": (w * p).sum() / (w * labels).sum(),
        }
        for name, value in expected.items():
            assert event[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("scale", [1.0, 3.0, 1e-3])
def test_the_loss_is_the_weighted_mean(scale):
    """Whatever the scale of the weights; rows of weight 0 give no gradient."""
    w = torch.tensor([0.0, 2.0, 0.5]) * scale
    logits = torch.tensor([[5.0], [-1.0], [0.3]], requires_grad=True)
    labels = torch.tensor([[0.0], [1], [0]])
    scaled = _scale_to_mean_1(w, 3, 1)
    total = _Losses(None)(logits, labels, scaled)
    assert scaled.mean() == pytest.approx(1)
    (total / 3).backward()
    gradient = w[:, None] * (torch.sigmoid(logits.detach()) - labels) / w.sum()
    torch.testing.assert_close(logits.grad, gradient)
    assert logits.grad[0] == 0


def test_the_losses_of_several_labels_are_summed():
    logits = torch.randn(5, 2, requires_grad=True)
    labels, w = torch.rand(5, 2).round(), torch.rand(5)
    _Losses(None)(logits, labels, w).backward()
    gradient = w[:, None] * (torch.sigmoid(logits.detach()) - labels)
    torch.testing.assert_close(logits.grad, gradient)


def test_a_batch_whose_weights_are_0():
    logits = torch.tensor([[5.0], [-1.0]], requires_grad=True)
    total = _Losses(None)(logits, torch.ones(2, 1), _scale_to_mean_1(torch.zeros(2), 2, 1))
    total.backward()
    assert total == 0
    assert logits.grad.tolist() == [[0], [0]]


def test_padding_rows_have_no_weight(weighted):
    (batch, *_) = KJTLoader(weighted / "train", 5, device="cpu", label=["label"])
    padded = TrainBatch.pad(batch, 8, 16).to(torch.device("cpu"))
    assert padded.weights.tolist() == [*batch.weights.tolist(), 0, 0, 0]
    assert (padded.rows, padded.global_size) == (5, 16)
    assert TrainBatch.pad(batch, 5, 16).weights is batch.weights


def test_ratings_are_refused(tmp_path):
    """Their cross-entropy has no minimum: the loss would fall to -184, with status 0."""
    write_split(tmp_path / "split", {"train": [400], "valid": [40], "test": [40]})
    path = tmp_path / "split" / "train" / "part.0.parquet"
    table = pq.read_table(path)
    ratings = pa.array(np.arange(400) % 5 + 1, pa.float32())
    field = table.schema.field("label")
    pq.write_table(table.set_column(table.schema.get_field_index("label"), field, ratings), path)
    with pytest.raises(
        SchemaError, match=r"train/part.0.parquet: column label holds 2[^$]*threshold"
    ):
        train_here(*small_run(tmp_path / "split", tmp_path))


def test_a_label_that_is_not_there(weighted, tmp_path):
    with pytest.raises(SettingsError, match=r"--label likd: .*no such label\n.*mean 'liked'"):
        train_here(*flags_of(weighted, tmp_path, "--label=likd"))


def test_resuming_with_another_label(weighted, tmp_path):
    steps = [f"--checkpoint_dir={tmp_path / 'steps'}", "--checkpoint_freq=5", "--max_steps=5"]
    train_here(*flags_of(weighted, tmp_path / "a", *steps, "--label=bought"))
    for other in ([], ["--label=liked"]):
        flags = flags_of(weighted, tmp_path / "b", *steps, *other, "--resume")
        with pytest.raises(SettingsError, match=r"label was bought, is (None|liked)"):
            train_here(*flags)
    resumed = train_here(*flags_of(weighted, tmp_path / "c", *steps, "--label=bought", "--resume"))
    assert resumed.steps == 5


def test_continuing_with_another_label(runs, weighted, tmp_path):
    before = f"--continue_from={runs[1, 'liked'] / 'final'}"
    with pytest.raises(SettingsError, match=r"on label liked, but this run trains label\n.*liked"):
        train_here(*flags_of(weighted, tmp_path, before))


def test_weights_for_another_label(runs, weighted, tmp_path, caplog):
    load = f"--load_checkpoint_path={runs[1, 'liked'] / 'final'}"
    train_here(*flags_of(weighted, tmp_path / "a", load, "--label=bought", "--max_steps=1"))
    assert "was trained on label liked, this run uses bought" in caplog.text


def test_an_evaluation_takes_the_label_of_its_checkpoint(runs, weighted, tmp_path):
    run = runs[1, "liked"]
    (expected,) = [e for e in events(run / "log", "evaluation") if e["split"] == "test"]
    load = [f"--load_checkpoint_path={run / 'final'}", "--mode=test", "--batch_size=64"]
    for name, label in (("a", []), ("b", ["--label=liked"]), ("c", ["--label=bought"])):
        flags = [f"--binary_path={weighted}", *load, *label, f"--log_path={tmp_path / name}"]
        result = train_here(*flags)
        found = result.metrics["test"]["positives"]
        assert (found == expected["positives"]) == (name != "c")


def test_two_labels_resume_bitwise_on_two_ranks(weighted, tmp_path):
    models = {"dlrm": TWO, "own": ["--model=examples.deepfm:build", "--embedding_dim=8"]}
    runs = []
    for name, model in models.items():
        common = [*FLAGS, "--label=liked,bought", "--adagrad", "--shuffle_training_set", *model]
        common.append("--epochs=1")
        steps = [f"--checkpoint_dir={tmp_path / name / 'steps'}", "--checkpoint_freq=4"]
        for run, more in (
            ("whole", []),
            ("begun", [*steps, "--max_steps=10"]),
            ("resumed", [*steps, "--resume"]),
        ):
            path = tmp_path / name / run
            runs.append(small_run(weighted, path, *common, *more, batch_size=16))
    train_many(runs, 2)
    for name in models:
        assert_same(tmp_path / name / "whole" / "final", tmp_path / name / "resumed" / "final")
        (resumed,) = events(tmp_path / name / "resumed" / "log", "resume")
        assert resumed["step"] == 8


def test_two_labels_from_the_checkpoint_to_the_page(runs, weighted, tmp_path, caplog):
    """A run that only evaluates, and one that is done already, have the metrics of each label."""
    caplog.set_level("INFO", "nvt_torchrec")
    run = runs[1, "liked,label"]
    kept = CheckpointRecord.read(run / "final")
    assert kept.labels == ("liked", "label")
    assert list(kept.training["metrics"]["test"]) == ["liked", "label"]
    load = [f"--load_checkpoint_path={run / 'final'}", "--mode=test", "--batch_size=64"]
    settings = parse_settings([f"--binary_path={weighted}", *load, f"--log_path={tmp_path}"])
    with process_group() as group:
        tested = train(settings, group)
    assert "test (liked): AUROC " in caplog.text
    assert re.search(r"split +label +samples.*\n +test +liked .*\n +test +label ", caplog.text)
    assert tested.metrics["test"] == {
        label: pytest.approx(numbers, abs=1e-6)
        for label, numbers in kept.training["metrics"]["test"].items()
    }
    again = train_here(*flags_of(weighted, run, label="liked,label"))
    assert again.status == "already done"
    assert again.metrics == kept.training["metrics"]
    page = re.sub(r"<.*?>", "", (run / "log" / "training.html").read_text())
    for label in ("liked", "label"):
        assert f"On test ({label}), dlrm is" in page
        assert f"test ({label}), logistic regression" in page


def test_what_several_labels_cannot_do(runs, weighted, tmp_path):
    steps = [f"--checkpoint_dir={tmp_path / 'steps'}", "--checkpoint_freq=5", "--max_steps=5"]
    train_here(*flags_of(weighted, tmp_path / "a", *steps, label="liked,label"))
    final = runs[1, "liked,label"] / "final"
    turned = ["--label=label,liked", *TWO]
    for flags, message in (
        ([*turned, *steps, "--resume"], "label was liked,label, is label,liked"),
        (["--label=bought", *steps, "--resume"], "another model: labels was 2, is 1"),
        ([f"--continue_from={final}"], "trained on label liked,label, but this run trains label\n"),
        ([f"--load_checkpoint_path={final}"], "another model: labels was 2, is 1"),
        ([*turned, "--undersampling_rate=0.5"], "labels label, liked\n.*give one label"),
        (["--label=label,label", *TWO], "one is named twice"),
        (["--label=label,liked"], r"no model of 2 labels has .* \(16, 1\)\n.*the last of which"),
    ):
        with pytest.raises((SettingsError, SchemaError), match=message):
            train_here(*flags_of(weighted, tmp_path / "b", *flags))
