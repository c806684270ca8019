"""Training with the correction for the popularity by which negatives were drawn."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.metrics import compute_metrics
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.baselines.baselines import CLICK_RATE, REGRESSION, TREES, Trees
from nvt_torchrec.training.baselines.regression import fit_regression
from nvt_torchrec.training.baselines.row_sample import Column, RowSample
from nvt_torchrec.training.data.loaders import TrainBatch
from nvt_torchrec.training.sharding.train_model import TrainModel
from tests.etl.runs import settings
from tests.training.runs import events, small_run, train_here, train_many

SPEC = """
[input]
format = "csv"
[label]
name = "liked"
value = 1
[split]
by = "share"
valid = 0.15
test = 0.15
[[categorical]]
names = ["user", "kind"]
raw = "int"
[[categorical]]
names = "item"
raw = "int"
[negatives]
item = "item"
user = "user"
per_positive = 3
popularity = {popularity}
"""
USERS, ITEMS, KINDS = 3_000, 60, 3


@dataclasses.dataclass(frozen=True)
class Likes:
    """A log of likes whose odds are known.

    Attributes:
        split: The splits that the ETL wrote.
        odds: float64 [kinds, items], the logarithm of the probability that a like of a user of a
            kind is of an item.
    """

    split: Path
    odds: np.ndarray


def write_likes(path: Path, popularity: float, *, rows: int = 9_000) -> Likes:
    """Write a log in which some items are liked far more than others, by all, and by a kind."""
    rng = np.random.default_rng(3)
    odds = -1.0 * np.log(np.arange(1, ITEMS + 1)) + rng.normal(0, 0.7, (KINDS, ITEMS))
    odds -= np.log(np.exp(odds).sum(1, keepdims=True))
    users = rng.integers(0, USERS, rows)
    kinds = users % KINDS
    lines = ["user,kind,item"]
    for user, kind in zip(users.tolist(), kinds.tolist(), strict=True):
        lines.append(f"{user},{kind},{rng.choice(ITEMS, p=np.exp(odds[kind]))}")
    (path / "raw").mkdir(parents=True)
    (path / "raw" / "likes.csv").write_text("\n".join(lines))
    (path / "spec.toml").write_text(SPEC.format(popularity=popularity))
    run(settings(path / "raw" / "likes.csv", path / "out", load_spec(path / "spec.toml")))
    return Likes(path / "out" / "criteo_binary" / "split", odds)


@pytest.fixture(scope="module")
def likes(tmp_path_factory: pytest.TempPathFactory) -> Likes:
    """A log whose negatives are drawn by popularity."""
    return write_likes(tmp_path_factory.mktemp("likes"), 1)


def read_corrections(split: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and corrections of a split, float32 [rows] each."""
    batches = list(KJTLoader(split, 512, device="cpu"))
    corrections = [batch.log_q_correction for batch in batches if len(batch.labels)]
    assert all(correction.is_contiguous() for correction in corrections)
    labels = torch.cat([batch.labels for batch in batches])
    return labels.numpy(), torch.cat(corrections).numpy()


class ConstantModel(nn.Module):
    """Returns one logit for all rows."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.head = nn.Module()
        self.head.module = nn.Module()
        self.logit = nn.Parameter(torch.tensor(logit))

    def forward(self, dense, sparse, vectors):
        return self.logit.expand(len(dense), 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("corrects", [True, False])
def test_the_loss_of_a_constant_logit(training: bool, corrects: bool) -> None:
    """By hand, with padding rows and weights, and with a share of the rows with label 0."""
    labels, weights = np.array([1.0, 0.0, 0.0]), np.array([1.0, 3.0, 2.0])
    correction = np.array([0.5, -1.5, 2.0])
    parts = [np.append(part, 0) for part in (labels, weights, correction)]
    padded = [torch.from_numpy(part).float() for part in parts]
    ids = KeyedJaggedTensor(["x"], torch.zeros(4).int(), lengths=torch.ones(4).int())
    batch = TrainBatch(
        torch.zeros(4, 1),
        ids,
        padded[0].unsqueeze(1),
        padded[1],
        log_q_correction=padded[2],
        rows=3,
        global_size=3,
    )
    model = TrainModel(ConstantModel(0.7), 1, kept_negatives=0.5, log_q_correction=corrects)
    loss, output = model.train(training)(batch)
    logits = 0.7 + (correction if corrects else 0)
    sampled = logits + (np.log(2) if training else 0)
    losses = np.logaddexp(0, sampled) - labels * sampled
    scale = weights * 3 / weights.sum() if training else weights
    assert loss.item() == pytest.approx((scale * losses).sum() / 3, rel=1e-6)
    np.testing.assert_allclose(output.logits[:, 0], logits, rtol=1e-6)
    loss.backward()
    errors = scale * (1 / (1 + np.exp(-sampled)) - labels)
    assert model.model.logit.grad.item() == pytest.approx(errors.sum() / 3, rel=1e-5)


def test_a_loss_of_ones_own_gets_corrected_logits() -> None:
    """Without a line in the model: it is added before the loss."""
    model = ConstantModel(0.7)
    model.head.module.loss = lambda logits, labels, weights: logits * labels
    ids = KeyedJaggedTensor(["x"], torch.zeros(2).int(), lengths=torch.ones(2).int())
    correction = torch.tensor([0.5, -1.0])
    batch = TrainBatch(
        torch.zeros(2, 1),
        ids,
        torch.ones(2, 1),
        log_q_correction=correction,
        rows=2,
        global_size=2,
    )
    loss, _ = TrainModel(model, 1, log_q_correction=True)(batch)
    assert loss.item() == pytest.approx((1.2 - 0.3) / 2)


def test_data_without_a_correction_are_left_as_they_are() -> None:
    ids = KeyedJaggedTensor(["x"], torch.zeros(2).int(), lengths=torch.ones(2).int())
    batch = TrainBatch(torch.zeros(2, 1), ids, torch.ones(2, 1), rows=2, global_size=2)
    _, output = TrainModel(ConstantModel(0.7), 1, log_q_correction=True)(batch)
    np.testing.assert_allclose(output.logits, 0.7)


def draw_rows(rng: np.random.Generator, effects: np.ndarray, *, corrects: bool) -> RowSample:
    """Return rows whose labels follow from the corrections of their ids alone, and from a bias."""
    ids = rng.integers(0, len(effects), 8_000)
    labels = rng.random(8_000) < 1 / (1 + np.exp(0.8 - effects[ids]))
    dense = rng.normal(size=(8_000, 1)).astype(np.float32)
    given = dense, [Column(ids, None)], {"x": labels.astype(np.float32)}, None
    return RowSample(*given, effects[ids] if corrects else 0.0)


@pytest.mark.parametrize("kind", ["regression", "with bins", "trees"])
def test_baselines_begin_at_the_correction(kind: str) -> None:
    """Little is left to learn; without it there is much."""
    deviations = []
    for corrects in (True, False):
        rng = np.random.default_rng(0)
        effects = rng.normal(0, 1.5, 20)
        train, valid = (draw_rows(rng, effects, corrects=corrects) for _ in range(2))
        if kind == "trees":
            model = Trees(train, valid, "x")
        else:
            edges = np.array([[-2.0, 0.0, 2.0]]) if kind == "with bins" else None
            model = fit_regression(train, "x", edges)
        left = model.logits(valid) - valid.corrections
        deviations.append(left.std())
        assert abs(compute_metrics(model.logits(valid), valid.labels["x"]).calibration - 1) < 0.05
    assert deviations[0] < 0.15
    assert deviations[1] > 1


def measure_scores(likes: Likes, bundle: Path) -> tuple[float, float]:
    """Return what a bundle's scores of all items are worth, the mean over kinds of users.

    Returns:
        Their rank correlation with the odds; and the mean score of a like and three items that are
        drawn evenly.
    """
    predictor = Predictor.load(bundle)
    correlations, means = [], []
    for kind, odds in enumerate(likes.odds):
        rows = {"user": [kind] * ITEMS, "kind": [kind] * ITEMS, "item": list(range(ITEMS))}
        scores = predictor.predict(rows)
        correlations.append(spearmanr(scores, odds).statistic)
        means.append((np.exp(odds) @ scores + 3 * scores.mean()) / 4)
    return float(np.mean(correlations)), float(np.mean(means))


def test_scores_rank_by_the_odds(likes: Likes, tmp_path: Path) -> None:
    """Of items that were drawn as often as they are liked: without the flag, popularity is lost."""
    workflow = likes.split.parents[1] / "workflow"
    found = {}
    for name, flag in {"with": ["--log_q_correction"], "without": []}.items():
        path = tmp_path / name
        more = ["--epochs=3", "--boosted_trees", *flag]
        result = train_here(*small_run(likes.split, path, *more, batch_size=128))
        write_bundle(workflow, path / "final", path / "bundle")
        found[name] = measure_scores(likes, path / "bundle")
        # what is measured is on the drawn rows, where both models predict as well
        assert abs(result.metrics["test"]["calibration"] - 1) < 0.1
        assert result.metrics["test"]["auroc"] > 0.6
        for event in events(path / "log", "baseline"):
            assert abs(event["calibration"] - 1) < 0.1
            assert event["name"] in (CLICK_RATE, REGRESSION, TREES)
    assert found["with"][0] > 0.85
    assert found["without"][0] < 0.6
    assert found["with"][1] == pytest.approx(1 / 4, abs=0.03)
    record = CheckpointRecord.read(tmp_path / "with" / "final")
    assert record.training["settings"]["log_q_correction"] is True


def test_the_loader_passes_what_the_files_hold(likes: Likes) -> None:
    """In each split, shuffled or not, on any number of ranks; the sum of all rows stays."""
    for split in ("train", "valid", "test"):
        labels, corrections = read_corrections(likes.split / split)
        assert set(labels.tolist()) == {0, 1}
        assert len(set(corrections.tolist())) > 10
        of_ranks = []
        for rank in range(3):
            options = {"rank": rank, "world_size": 3, "shuffle": True, "device": "cpu"}
            for batch in KJTLoader(likes.split / split, 100, **options):
                of_ranks += batch.log_q_correction.tolist()
        assert sorted(of_ranks) == sorted(corrections.tolist())


def test_two_ranks_train_as_one(likes: Likes, tmp_path: Path) -> None:
    flags = [
        "--log_q_correction",
        "--limit_train_batches=30",
        "--throughput_check_freq_within_epoch=1",
    ]
    train_here(*small_run(likes.split, tmp_path / "one", *flags, batch_size=64))
    train_many([small_run(likes.split, tmp_path / "two", *flags)], 2)
    one, two = (
        [event["loss"] for event in events(tmp_path / name / "log", "train")]
        for name in ("one", "two")
    )
    assert len(one) == 30
    np.testing.assert_allclose(one, two, rtol=1e-4)


def test_a_run_that_goes_on_keeps_the_flag(likes: Likes, tmp_path: Path) -> None:
    """Resumed, continued or tested; the other way is refused where that would be trained on."""
    flags = ["--log_q_correction", "--limit_train_batches=20"]
    steps = f"--checkpoint_dir={tmp_path / 'steps'}"
    train_here(*small_run(likes.split, tmp_path / "a", *flags, steps, "--checkpoint_freq=10"))
    final = tmp_path / "a" / "final"
    expected = events(tmp_path / "a" / "log", "evaluation")[-1]

    def test(*more: str) -> dict:
        run_flags = [f"--binary_path={likes.split}", f"--log_path={tmp_path / 'tested'}"]
        return train_here(*run_flags, "--mode=test", *more).metrics["test"]

    kept = test(f"--load_checkpoint_path={final}")
    assert kept["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-6)
    off = test(f"--load_checkpoint_path={final}", "--no-log_q_correction")
    assert off["log_loss"] > kept["log_loss"] + 0.01
    continued = [f"--continue_from={final}", "--limit_train_batches=20"]
    train_here(*small_run(likes.split, tmp_path / "b", *continued))
    record = CheckpointRecord.read(tmp_path / "b" / "final")
    assert record.training["settings"]["log_q_correction"] is True
    with pytest.raises(SettingsError, match=r"with --log_q_correction, but this run has --no-log"):
        train_here(*small_run(likes.split, tmp_path / "c", *continued, "--no-log_q_correction"))
    resumed = [steps, "--resume", "--limit_train_batches=20"]
    with pytest.raises(SettingsError, match="log_q_correction was True, is False"):
        train_here(*small_run(likes.split, tmp_path / "d", *resumed, "--no-log_q_correction"))
    train_here(*small_run(likes.split, tmp_path / "e", *resumed))


def test_data_drawn_evenly_are_refused_with_the_flag(tmp_path: Path) -> None:
    likes = write_likes(tmp_path, 0, rows=300)
    with pytest.raises(SettingsError, match="the data have no log-Q correction"):
        train_here(*small_run(likes.split, tmp_path / "run", "--log_q_correction"))
    train_here(*small_run(likes.split, tmp_path / "run"))
