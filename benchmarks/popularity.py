"""Compare uniform and popularity-based negatives, with and without ``--log_q_correction``.

The log is synthetic, so the odds that a user likes an item are known: a few items are liked by
many, and each kind of user has its own taste. The benchmark measures how a model ranks all items
for each kind of user: Spearman's correlation with the odds, and the AUROC of liked items against
all items. The AUROC on the drawn rows, from the trainer's log, cannot be compared between different
ways of drawing.

Everything after -- goes to train_torchrec.py.

    python -m benchmarks.popularity --popularities 0,0.5,1
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from benchmarks.data import make_once
from benchmarks.harness import Metric, System, Table, run_benchmark, run_etl, split_flags
from benchmarks.process import BUILD, ROOT
from nvt_torchrec.base.auroc import auroc
from nvt_torchrec.base.command_line import Settings, flag

METRICS = (
    Metric("correlation", "correlation with the odds", ".3f"),
    Metric("auroc", "AUROC against all items", ".4f"),
    Metric("oracle", "the odds' AUROC", ".4f"),
    Metric("drawn_auroc", "AUROC of drawn rows", ".4f"),
    Metric("calibration", "their calibration", ".3f"),
)
_KINDS = 20
_SPEC = """[input]
format = "csv"
[label]
name = "liked"
value = 1
[split]
by = "share"
valid = 0.1
test = 0.1
[[categorical]]
names = ["kind", "item"]
raw = "int"
[negatives]
item = "item"
user = "user"
per_positive = 4
popularity = {popularity}
"""
#: Flags of the trainer. Without them, it would choose the regularization of such a small log by
#: several trainings.
_FLAGS = ("--epochs", "5", "--no-batch_norm", "--embedding_dim", "16", "--no-boosted_trees")


@dataclasses.dataclass(frozen=True)
class PopularitySettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("likes in the log", 60_000, minimum=1000)
    users: int = flag("users", 30_000, minimum=100)
    items: int = flag("items", 400, minimum=10)
    popularities: tuple[float, ...] = flag(
        "exponents of the popularity by which negatives are drawn; 0 for uniform", (0.0, 0.5, 1.0)
    )
    repeats: int = flag("trainings of each case, with different seeds", 1, minimum=1)


@dataclasses.dataclass(frozen=True)
class Likes:
    """A log of likes.

    Attributes:
        odds: Float64 [kinds of users, items], the logarithm of the probability that a like of such
            a user belongs to the item.
        frame: The likes, with the columns user, kind and item.
    """

    odds: np.ndarray
    frame: pd.DataFrame


def draw_likes(rows: int, users: int, items: int) -> Likes:
    """Draw likes by the odds of the items."""
    random = np.random.default_rng(11)
    odds = -np.log(np.arange(1, items + 1)) + random.normal(0, 0.8, (_KINDS, items))
    odds -= np.log(np.exp(odds).sum(1, keepdims=True))
    user = random.integers(0, users, rows)
    kind = user % _KINDS
    # Each item gets an interval of [0, 1) as wide as its probability.
    ends = np.exp(odds).cumsum(1)
    drawn = random.random(rows)
    item = np.empty(rows, np.int64)
    for k in range(_KINDS):
        item[kind == k] = np.searchsorted(ends[k], drawn[kind == k]).clip(max=items - 1)
    return Likes(odds, pd.DataFrame({"user": user, "kind": kind, "item": item}))


def measure_ranks(likes: Likes, workflow: Path, checkpoint: Path) -> dict[str, float]:
    """Measure how a model ranks all items for each kind of user.

    Args:
        likes: The likes and their odds.
        workflow: The workflow's directory.
        checkpoint: The model's directory.
    """
    from nvt_torchrec.inference.predictor import Predictor

    predictor = Predictor.load(workflow, checkpoint)
    num_items = likes.odds.shape[1]
    items = np.arange(num_items)
    correlations = []
    model_aurocs = []
    oracle_aurocs = []
    for kind, odds in enumerate(likes.odds):
        scores = predictor.predict(pd.DataFrame({"kind": kind, "item": items}))
        correlations.append(spearmanr(scores, odds).statistic)
        # Every item is once a positive, weighted by the probability of a like, and once a negative.
        labels = np.repeat([1, 0], num_items)
        weights = np.concatenate([np.exp(odds), np.full(num_items, 1 / num_items)])
        model_aurocs.append(auroc(np.tile(scores, 2), labels, weights))
        oracle_aurocs.append(auroc(np.tile(odds, 2), labels, weights))
    return {
        "correlation": float(np.mean(correlations)),
        "auroc": float(np.mean(model_aurocs)),
        "oracle": float(np.mean(oracle_aurocs)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    arguments, flags = split_flags(sys.argv[1:] if argv is None else argv)
    work = functools.partial(_run, flags=flags)
    return run_benchmark("popularity", __doc__, PopularitySettings, work, arguments)


def _run(settings: PopularitySettings, flags: list[str]) -> int:
    rows = settings.rows
    users = settings.users
    items = settings.items
    root = BUILD / f"popularity-{rows}-{users}-{items}"
    likes = draw_likes(rows, users, items)
    size = f"{rows:,} likes of {users:,} users and {items:,} items"
    make_once(root, size, lambda: likes.frame.to_csv(root / "log.csv", index=False))
    table = Table("popularity", f"Ranks of all items: {size}", METRICS, base="")
    for seed in range(settings.repeats):
        systems = []
        for popularity in settings.popularities:
            output = root / f"out-{popularity:g}"
            _run_etl(root / "log.csv", output, popularity)
            case = f"popularity {popularity:g}"
            # With uniform negatives, the correction is a constant.
            corrections = ("", "--log_q_correction") if popularity else ("",)
            for correction in corrections:
                run_flags = [*_FLAGS, "--seed", str(seed), *correction.split(), *flags]
                systems.append(_make_run(likes, output, case, correction, run_flags))
        table.measure(systems, repeats=1)
    return table.finish()


def _run_etl(log: Path, output: Path, popularity: float) -> None:
    """Run the ETL, unless its output already exists."""
    spec = output.with_suffix(f".{popularity:g}.toml")
    spec.write_text(_SPEC.format(popularity=popularity))
    if not (output / "manifest.json").exists():
        run_etl("run", "--spec", spec, "--input_path", log, "--output_path", output)


def _make_run(
    likes: Likes, output: Path, case: str, correction: str, flags: Sequence[str]
) -> System:
    """Make a run of ``train_torchrec.py``, measured by its checkpoint and its log."""
    from nvt_torchrec.training.reporting.metrics_log import METRICS_FILE
    from nvt_torchrec.training.reporting.page import read_events

    target = output / f"run{correction}"

    def result() -> dict[str, Any]:
        metrics: dict[str, Any] = measure_ranks(likes, output / "workflow", target / "end")
        for event in read_events(target / METRICS_FILE):  # the last evaluation counts
            if event["event"] == "evaluation" and event["split"] == "test":
                metrics["drawn_auroc"] = event["auroc"]
                metrics["calibration"] = event["calibration"]
        return metrics

    split = output / "criteo_binary" / "split"
    paths = "--binary_path", split, "--log_path", target, "--save_checkpoint_path", target / "end"
    return System(
        correction.strip("-") or "no correction",
        case,
        [sys.executable, ROOT / "train_torchrec.py", *map(str, paths), *flags],
        before=lambda: shutil.rmtree(target, ignore_errors=True),
        result=result,
    )


if __name__ == "__main__":
    sys.exit(main())
