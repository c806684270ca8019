"""Negatives drawn evenly and by popularity, and training with and without ``--log_q_correction``.

The odds that a user likes an item are known: a few items are liked by many, and each kind of user
has a taste of its own. Measured is how a model ranks all items for each kind of user: Spearman's
correlation with the odds, and the AUROC of the items that test users liked beside all items. The
AUROC on the drawn rows is that of the trainer's log, which no two ways of drawing share.

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
    Metric("auroc", "AUROC beside all items", ".4f"),
    Metric("oracle", "that of the odds", ".4f"),
    Metric("drawn_auroc", "AUROC of drawn rows", ".4f"),
    Metric("calibration", "calibration there", ".3f"),
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
#: Without these, a log of this size would choose its regularization by several trainings.
_FLAGS = ("--epochs", "5", "--no-batch_norm", "--embedding_dim", "16", "--no-boosted_trees")


@dataclasses.dataclass(frozen=True)
class PopularitySettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("likes", 60_000, minimum=1000)
    users: int = flag("users", 30_000, minimum=100)
    items: int = flag("items", 400, minimum=10)
    popularities: tuple[float, ...] = flag("powers of the popularity", (0.0, 0.5, 1.0))
    repeats: int = flag("trainings of each, with other seeds", 1, minimum=1)


@dataclasses.dataclass(frozen=True)
class Likes:
    """A log of likes.

    Attributes:
        odds: float64 [kinds, items], the logarithm of the probability that a like of a user of this
            kind is of this item.
        frame: The likes: user, kind and item.
    """

    odds: np.ndarray
    frame: pd.DataFrame


def draw_likes(rows: int, users: int, items: int) -> Likes:
    """Draw likes of items by their odds."""
    random = np.random.default_rng(11)
    odds = -np.log(np.arange(1, items + 1)) + random.normal(0, 0.8, (_KINDS, items))
    odds -= np.log(np.exp(odds).sum(1, keepdims=True))
    user = random.integers(0, users, rows)
    kind = user % _KINDS
    # An item has a part of [0, 1) as wide as its probability.
    ends = np.exp(odds).cumsum(1)
    drawn = random.random(rows)
    item = np.empty(rows, np.int64)
    for k in range(_KINDS):
        item[kind == k] = np.searchsorted(ends[k], drawn[kind == k]).clip(max=items - 1)
    return Likes(odds, pd.DataFrame({"user": user, "kind": kind, "item": item}))


def measure_ranks(likes: Likes, workflow: Path, checkpoint: Path) -> dict[str, float]:
    """Return how a model ranks all items for users of each kind."""
    from nvt_torchrec.inference.predictor import Predictor

    predictor = Predictor.load(workflow, checkpoint)
    num_items = likes.odds.shape[1]
    items = np.arange(num_items)
    correlations, areas, oracle = [], [], []
    for kind, odds in enumerate(likes.odds):
        scores = predictor.predict(pd.DataFrame({"kind": kind, "item": items}))
        correlations.append(spearmanr(scores, odds).statistic)
        # Each like beside all items: a like weighs as the item's probability does.
        labels = np.repeat([1, 0], num_items)
        weights = np.concatenate([np.exp(odds), np.full(num_items, 1 / num_items)])
        for values, found in ((scores, areas), (odds, oracle)):
            found.append(auroc(np.tile(values, 2), labels, weights))
    return {
        "correlation": float(np.mean(correlations)),
        "auroc": float(np.mean(areas)),
        "oracle": float(np.mean(oracle)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    arguments, flags = split_flags(sys.argv[1:] if argv is None else argv)
    work = functools.partial(_run, flags=flags)
    return run_benchmark("popularity", __doc__, PopularitySettings, work, arguments)


def _run(settings: PopularitySettings, flags: list[str]) -> int:
    rows, users, items = settings.rows, settings.users, settings.items
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
            kinds = ("", "--log_q_correction") if popularity else ("",)
            for kind in kinds:
                given = [*_FLAGS, "--seed", str(seed), *kind.split(), *flags]
                systems.append(_make_run(likes, output, f"popularity {popularity:g}", kind, given))
        table.measure(systems, repeats=1)
    return table.finish()


def _run_etl(log: Path, output: Path, popularity: float) -> None:
    """Run the ETL, unless its output is there."""
    spec = output.with_suffix(f".{popularity:g}.toml")
    spec.write_text(_SPEC.format(popularity=popularity))
    if not (output / "manifest.json").exists():
        run_etl("run", "--spec", spec, "--input_path", log, "--output_path", output)


def _make_run(likes: Likes, output: Path, case: str, kind: str, flags: Sequence[str]) -> System:
    """Return a run of ``train_torchrec.py``, measured by its checkpoint and its log."""
    from nvt_torchrec.training.reporting.metrics_log import METRICS_FILE
    from nvt_torchrec.training.reporting.page import read_events

    target = output / f"run{kind}"

    def result() -> dict[str, Any]:
        found: dict[str, Any] = measure_ranks(likes, output / "workflow", target / "end")
        for event in read_events(target / METRICS_FILE):  # the last evaluation counts
            if event["event"] == "evaluation" and event["split"] == "test":
                found |= {"drawn_auroc": event["auroc"], "calibration": event["calibration"]}
        return found

    split = output / "criteo_binary" / "split"
    paths = "--binary_path", split, "--log_path", target, "--save_checkpoint_path", target / "end"
    return System(
        kind.strip("-") or "as it is",
        case,
        [sys.executable, ROOT / "train_torchrec.py", *map(str, paths), *flags],
        before=lambda: shutil.rmtree(target, ignore_errors=True),
        result=result,
    )


if __name__ == "__main__":
    sys.exit(main())
