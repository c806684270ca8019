"""A run that does not learn says so at once, and what to do."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from nvt_torchrec.models.metrics import Metrics, compute_metrics
from nvt_torchrec.training.baselines.baselines import CLICK_RATE, REGRESSION, TREES
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.reporting import learning_check
from nvt_torchrec.training.reporting.learning_check import LearningCheck
from nvt_torchrec.training.settings.optimizers import Remedies
from nvt_torchrec.training.settings.train_settings import parse_settings
from tests.training.runs import EXAMPLE, events, train_here
from tests.training.shapes import dlrm

WIDE = ["--dense_arch_layer_sizes=64,8", "--over_arch_layer_sizes=1024,1024,1"]


@pytest.fixture(scope="module")
def noise(learnable, tmp_path_factory):
    """The same with labels that depend on nothing."""
    path = shutil.copytree(learnable, tmp_path_factory.mktemp("noise") / "split")
    for part in path.glob("*/part.*.parquet"):
        table = pq.read_table(part)
        labels = np.random.default_rng(0).permutation(table["label"].to_numpy())
        at = table.column_names.index("label")
        pq.write_table(table.set_column(at, table.field(at), [labels]), part, row_group_size=4096)
    for file in path.glob("**/_metadata"):
        file.unlink()
    return path


def _warnings(data, log, *flags: str) -> list[str]:
    """Return the warnings of a run with Adagrad."""
    train_here(f"--binary_path={data}", f"--log_path={log}", "--adagrad", *flags)
    return [f"step {event['step']}: {event['text']}" for event in events(log, "warning")]


def test_a_run_that_learns_is_not_warned(learnable, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(learning_check, "_SUSPICIOUS", 0.5)  # repeated rows are looked for
    assert not _warnings(learnable, tmp_path, "--batch_size=256", "--epochs=2")
    assert "nothing is learned" not in caplog.text


def test_training_rows_in_another_split(learnable, tmp_path, caplog, monkeypatch):
    """A day that was exported twice, in another order."""
    monkeypatch.setattr(learning_check, "_SUSPICIOUS", 0.5)
    path = shutil.copytree(learnable, tmp_path / "split")
    rows = pq.read_table(next(path.glob("train/part.*.parquet")))
    rows = rows.take(np.random.default_rng(0).permutation(len(rows))[:4096])
    pq.write_table(rows, next(path.glob("test/part.*.parquet")))
    for file in path.glob("**/_metadata"):
        file.unlink()
    (warning,) = _warnings(path, tmp_path / "log", "--batch_size=256")
    assert warning.endswith(" of test is too good to be true")
    assert "100% of its rows are in the training set as well" in caplog.text


def test_a_loss_that_explodes(learnable, tmp_path, caplog):
    """The settings of public recipes: one learning rate for tables and wide layers."""
    flags = [*EXAMPLE, "--learning_rate=0.1", "--batch_size=1024", "--max_steps=4", *WIDE]
    (first, *_) = _warnings(learnable, tmp_path, *flags)
    assert first.startswith(("step 1: loss", "step 2: loss", "step 4: loss"))
    assert "training diverges" in first
    assert "leave --learning_rate 0.1 out: the default is" in caplog.text


def test_nothing_learned_by_an_evaluation_of_valid(noise, tmp_path, caplog):
    text, at_end = _warnings(noise, tmp_path, "--batch_size=128")
    assert text.startswith("step 128: AUROC 0.")
    assert text.endswith("of valid: nothing is learned yet")
    assert at_end.endswith("of always predicting the click rate")
    assert "whether any column says anything about the label" in caplog.text


LABELS = (np.random.default_rng(0).random(20_000) < 0.25).astype(np.float32)
SHAPE = dlrm(("d",), ("a", "b"), (9, 9), 4, (4,), (4, 1), 0.0)


def _metrics(calibration=1.0, signal=0.0, labels=LABELS, weights=None) -> Metrics:
    """Return the metrics of predictions with this calibration, which rank better by ``signal``."""
    rate = calibration * LABELS.mean()
    noise = np.random.default_rng(1).normal(0, 0.1 if signal else 0.0, len(labels))
    x = signal * (labels - LABELS.mean()) + noise + np.log(rate / (1 - rate))
    return compute_metrics(x, labels, weights)


class _Check(LearningCheck):
    """A check on one rank, and the warnings that it gives at the end."""

    def __init__(self, *losses: float, shuffled: bool = True, labels: str = "label") -> None:
        self.written: list[dict] = []
        group = Group(0, 1, 1, torch.device("cpu"), None)
        given = [f"--{'' if shuffled else 'no-'}shuffle_training_set", f"--label={labels}"]
        given += ["--epochs=1"]
        settings = parse_settings(given)
        super().__init__(settings, group, self, epoch_steps=10, remedies=Remedies("", "", "rates"))
        for number, loss in enumerate(losses, start=1):
            self.note_evaluation(10 * number, {"label": Metrics(9, 3, auroc=0.9, log_loss=loss)})

    def write(self, event: str, **values) -> None:
        self.written.append(values)

    def at_end(self, model: Metrics, constant: Metrics, regression: Metrics) -> list[str]:
        beside = {("test", CLICK_RATE): constant, ("test", REGRESSION): regression}
        baselines = {key: {"label": metrics} for key, metrics in beside.items()}
        warnings = self.check_final(20, SHAPE, {"test": {"label": model}}, baselines)
        assert [
            f"WARNING: step 20: {e['text']}\n  -> {e['remedy']}" for e in self.written
        ] == warnings
        return warnings


@pytest.mark.parametrize("weights", [None, np.full(len(LABELS), 0.2)])
@pytest.mark.parametrize(
    ("calibrations", "remedy"),
    [
        ((1.01, 1.0, 1.0), None),
        ((1.2, 1.0, 1.0), "rates"),  # the model's own
        ((0.8, 1.0, 0.82), "--freq_threshold"),  # of what both learned, not of the click rate
        ((0.8, 0.79, 0.82), "rows of the same time"),
        ((0.8, 0.79, 1.0), "rates"),  # the columns explain the shift
    ],
)
def test_calibration(calibrations, remedy, weights):
    warnings = _Check().at_end(*(_metrics(value, weights=weights) for value in calibrations))
    assert len(warnings) == (remedy is not None)
    if remedy:
        assert f"calibration {calibrations[0]:.3f} of test" in warnings[0]
        assert remedy in warnings[0]


def test_rows_of_one_label():
    """A run on a log without a click ended without a word."""
    nothing = _metrics(labels=np.zeros(20_000, np.float32))
    (warning,) = _Check().at_end(nothing, nothing, nothing)
    assert "no AUROC of test: all its rows have the same label" in warning


def test_worse_than_the_regression_by_more_than_chance():
    worse, good, equal = (_metrics(signal=signal) for signal in (0.1, 0.2, 0.2001))
    assert not _Check().at_end(good, _metrics(), equal)
    (warning,) = _Check(0.5, 0.4).at_end(worse, _metrics(), good)
    expected = f"AUROC {worse.auroc:.4f} of test is worse than the {good.auroc:.4f} of a logistic"
    assert expected in warning
    assert "-> rates" in warning
    (warning,) = _Check(0.5, 0.4, shuffled=False).at_end(worse, _metrics(), good)
    assert "give --shuffle_training_set; or rates" in warning
    (warning,) = _Check(0.40, 0.41, shuffled=False).at_end(worse, _metrics(), good)
    assert "overfitting: the log loss of valid was 0.4000 after step 10 and is 0.4100" in warning
    check = _Check(0.5, 0.4)
    beside = {("test", TREES): {"label": worse}}
    for model, count in ((_metrics(signal=0.0985), 0), (_metrics(signal=0.09), 1)):
        assert len(check.check_final(20, SHAPE, {"test": {"label": model}}, beside)) == count
    assert f"worse than the {worse.auroc:.4f} of boosted trees" in check.written[-1]["text"]
    both = {("test", name): {"label": good} for name in (REGRESSION, TREES)}
    (warning,) = _Check(0.5, 0.4).check_final(20, SHAPE, {"test": {"label": worse}}, both)
    number = f"{good.auroc:.4f}"
    assert (
        f"than the {number} of a logistic regression and the {number} of boosted trees" in warning
    )
    few = LABELS[:200]
    few_worse, few_good = (_metrics(signal=signal, labels=few) for signal in (0.19, 0.2))
    assert not _Check().at_end(few_worse, _metrics(), few_good), "chance"


def test_a_log_loss_above_that_of_the_click_rate():
    """Of a model that is calibrated, and too sure."""
    random = np.random.default_rng(3)
    sure, constant = compute_metrics(random.normal(-1.35, 0.8, len(LABELS)), LABELS), _metrics()
    (warning,) = _Check(0.5, 0.4).check_final(
        20, SHAPE, {"test": {"label": sure}}, _named(constant)
    )
    assert "of test is above the 0.5564 of always predicting the click rate" in warning
    even = dataclasses.replace(constant, auroc=0.5)
    assert not _Check().check_final(20, SHAPE, {"test": {"label": even}}, _named(constant))


def _named(constant: Metrics) -> dict:
    return {("test", CLICK_RATE): {"label": constant}}


@pytest.mark.parametrize(
    ("losses", "advice"),
    [
        ((0.5, 0.47, 0.45, 0.44), "fell from 0.4500 to 0.4400 in the last quarter; try --epochs 2"),
        ((0.5, 0.47, 0.4401, 0.44), ""),
        ((0.5, 0.44, 0.43, 0.45), ""),
        ((0.5,), ""),
    ],
)
def test_a_run_that_still_improves_is_told_to_train_longer(losses, advice):
    found = _Check(*losses).suggest_longer_training()
    assert advice in found
    assert bool(found) == bool(advice)


def test_of_several_labels_the_bad_one_is_named():
    worse, good, off = _metrics(signal=0.1), _metrics(signal=0.2), _metrics(1.2, signal=0.2)
    check = _Check(labels="a,b,c")
    baselines = {("test", REGRESSION): dict.fromkeys("ab", good)}  # c had no regression
    results = {"test": {"a": good, "b": worse, "c": off}}
    first, second = check.check_final(20, SHAPE, results, baselines)
    assert f"AUROC {worse.auroc:.4f} of test (b) is worse than the {good.auroc:.4f}" in first
    assert "calibration 1.2" in second
    assert "of test (c): " in second
    noise = compute_metrics(np.random.default_rng(2).normal(0, 0.1, len(LABELS)), LABELS)
    check.note_evaluation(30, {"a": good, "b": noise, "c": good})
    assert check.written[-1]["text"].endswith(" of valid (b): nothing is learned yet")


@pytest.mark.parametrize("kind", ["id", "number", "noisy id"])
def test_a_column_that_gives_the_label_away_is_named(learnable, tmp_path, caplog, kind):
    path = shutil.copytree(learnable, tmp_path / "split")
    name = "int_2" if kind == "number" else "cat_0"
    for part in path.glob("*/part.*.parquet"):
        table = pq.read_table(part)
        at = table.column_names.index(name)
        label = table["label"].to_numpy()
        # of the clicks another value each
        values = label * (1 + np.arange(len(label))) if kind == "number" else 3 + 4 * label
        if kind == "noisy id":
            values[::33] = 7
        values = values.astype(table.field(at).type.to_pandas_dtype())
        pq.write_table(table.set_column(at, table.field(at), [values]), part, row_group_size=4096)
    for file in path.glob("**/_metadata"):
        file.unlink()
    caplog.set_level("INFO", "nvt_torchrec")
    warnings = _warnings(path, tmp_path / "log", "--batch_size=256", "--epochs=2")
    assert any("too good to be true" in text for text in warnings), warnings
    auroc = "0.98" if kind == "noisy id" else "1.000: leave out"
    said = f"look at column {name}, which alone has {auroc}"
    assert said in caplog.text.split("report: ")[1], "the log ends with it"
    assert said in (tmp_path / "log" / "training.html").read_text()
