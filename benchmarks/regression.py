"""Compare the trainer's defaults with regression and boosted trees, on twelve kinds of logs.

Each log is trained with every optimizer and model, with default values of their flags.
scikit-learn's logistic regression has a weight for each value of a column (C = 1), and uses the
same rows; the trees are the ones that the training run itself fits (``training.baselines``). Oracle
is the AUROC of the probabilities with which the clicks were drawn.

Everything after -- goes to train_torchrec.py.

    python -m benchmarks.regression --logs additive,census --optimizers default --seeds 3
    python -m benchmarks.regression --logs crossed --optimizers default \\
        --models dlrm,deepfm,dcn_v2,final_mlp
    python -m benchmarks.regression --logs alike --optimizers default --models dlrm,din
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from benchmarks.data import make_once
from benchmarks.harness import Metric, System, Table, run_benchmark, run_etl, split_flags
from benchmarks.process import BUILD, ROOT
from nvt_torchrec.base.auroc import auroc
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.clicklog.synthetic.event_log import EVENTS, draw_events, draw_zipf, format_seconds
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.metrics import compute_metrics
from nvt_torchrec.training.baselines.baselines import TREES
from nvt_torchrec.training.reporting.metrics_log import METRICS_FILE
from nvt_torchrec.training.reporting.page import read_events

METRICS = (
    Metric("auroc", "AUROC", ".4f"),
    Metric("regression_auroc", "regression's", ".4f"),
    Metric("trees", "trees'", ".4f"),
    Metric("oracle", "oracle's", ".4f"),
    Metric("log_loss", "log loss", ".4f"),
    Metric("regression_log_loss", "regression's", ".4f"),
    Metric("calibration", "calibration", ".3f"),
    Metric("regression_calibration", "regression's", ".3f"),
    Metric("samples_per_s", "samples/s"),
)
#: "default" passes no flag; then logs below a million rows choose their regularization on valid.
OPTIMIZERS = ("default", "rowwise_adagrad", "adagrad", "sgd")
#: The most rows to which the regression is fitted; it needs all of them in memory.
_MAX_FITTED_ROWS = 800_000

#: The logits of the clicks, float64 [rows], and the columns of the rows.
DrawnLog = tuple[np.ndarray, pd.DataFrame]


def _draw_additive(rows: int, users: int, items: int, crossed: float = 0.0) -> DrawnLog:
    """Draw a log whose logits are sums of effects of user, item, category and log price.

    With ``crossed``, products of vectors of user and item are added.
    """
    random = np.random.default_rng(7)
    user = draw_zipf(random, rows, users)
    item = draw_zipf(random, rows, items)
    category = random.integers(0, 30, items)[item]
    price = random.normal(3, 1, items)[item] + random.normal(0, 0.3, rows)
    logits = random.normal(0, 0.9, users)[user] + random.normal(0, 0.7, items)[item]
    logits += random.normal(0, 0.5, 30)[category] - 0.5 * (price - 3) - 1.6
    user_vectors = random.normal(0, 1, (users, 4))
    item_vectors = random.normal(0, 1, (items, 4))
    logits += crossed / 2 * (user_vectors[user] * item_vectors[item]).sum(1)
    columns = {"user": user, "item": item, "category": category}
    return logits, pd.DataFrame({**columns, "price": np.exp(price).round(2)})


def _draw_sorted_by_user(rows: int, users: int, items: int) -> DrawnLog:
    """Draw an additive log, sorted by user like some exports of databases."""
    logits, frame = _draw_additive(rows, users, items)
    order = np.argsort(frame["user"].to_numpy(), kind="stable")
    return logits[order], frame.iloc[order]


def _draw_census(rows: int) -> DrawnLog:
    """Draw many columns with few values, and numbers with nonlinear effects."""
    random = np.random.default_rng(4)
    columns = {f"c{size}": draw_zipf(random, rows, size) for size in (9, 16, 7, 15, 6, 5, 2, 42)}
    logits = sum(random.normal(0, 0.6, x.max() + 1)[x] for x in columns.values()) - 1.2
    age = random.normal(39, 13, rows).clip(17, 90).astype(int)
    hours = random.normal(40, 12, rows).clip(1, 99).astype(int)
    logits += 0.03 * (hours - 40) - 0.8 * ((age - 48) / 14) ** 2
    logits += random.normal(0, 0.6, (9, 16))[columns["c9"], columns["c16"]]
    return logits, pd.DataFrame({**columns, "age": age, "hours": hours})


def _draw_bent(rows: int) -> DrawnLog:
    """Draw columns with few values, and numbers whose effects are humps, steps and interactions."""
    random = np.random.default_rng(6)
    columns = {f"c{size}": draw_zipf(random, rows, size) for size in (5, 12)}
    logits = sum(random.normal(0, 0.5, x.max() + 1)[x] for x in columns.values()) - 1.0
    age = random.normal(39, 13, rows).clip(17, 90).astype(int)
    hours = random.normal(40, 12, rows).clip(1, 99).astype(int)
    price = random.lognormal(3, 1, rows).round(2)
    logits += 1.2 * np.cos((age - 45) / 8) + 1.2 * (hours > 40) - 0.8 * (hours > 55)
    logits += 1.2 * np.exp(-((np.log(price) - 3) ** 2) * 4) - (price > 60)
    logits += 1.2 * (age < 35) * (hours < 38)
    return logits, pd.DataFrame({**columns, "age": age, "hours": hours, "price": price})


@functools.cache
def _draw_visits(rows: int) -> DrawnLog:
    """Draw clicks that depend on earlier events of the user (``etl synthesize --events``)."""
    logits, _, table = draw_events(rows, days=30, seed=8, begin=1_790_000_000)
    return logits, table.to_pandas()


@functools.cache
def _draw_alike(rows: int) -> DrawnLog:
    """Draw clicks that depend on the most similar of the user's last 50 items, by hidden vectors.

    There are 30 kinds of items, and users, who come and go, see items of all kinds. So neither the
    user nor the average of the user's items is informative; only the most similar one is.
    """
    random = np.random.default_rng(9)
    users = rows // 100
    items = 500
    kinds = 30
    vectors = random.normal(0, 1, (kinds, 8))[random.integers(0, kinds, items)]
    vectors += random.normal(0, 0.4, vectors.shape)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    similarities = vectors @ vectors.T
    user = np.arange(rows) * users // rows + random.integers(0, users // 10, rows)
    item = random.integers(0, items, rows)
    seconds = np.sort(random.choice(30 * 86_400, rows, replace=False))
    seen: list[list[int]] = [[] for _ in range(user.max() + 1)]
    max_similarity = np.empty(rows)
    for row, (u, i) in enumerate(zip(user, item, strict=True)):
        max_similarity[row] = similarities[i, seen[u][-50:]].max(initial=0)
        seen[u].append(i)
    logits = 9 * (max_similarity - 0.8) + random.normal(0, 0.5, items)[item]
    time = format_seconds(1_790_000_000 + seconds).to_pandas()
    columns = {"time": time, "user": user, "item": item}
    columns["price"] = random.lognormal(3, 1, rows).round(2)
    clicks = random.random(rows) < 1 / (1 + np.exp(-logits))
    return logits, pd.DataFrame({**columns, "click": clicks})


#: Log → function that draws it; None for the log of ``etl synthesize``.
LOGS: dict[str, Callable[[], DrawnLog] | None] = {
    "additive": functools.partial(_draw_additive, 100_000, users=20_000, items=3_000),
    "large": functools.partial(_draw_additive, 1_000_000, users=30_000, items=5_000),
    "crossed": functools.partial(_draw_additive, 300_000, users=3_000, items=1_000, crossed=0.8),
    "census": functools.partial(_draw_census, 48_000),
    "plays": functools.partial(_draw_sorted_by_user, 75_000, users=2_000, items=4_000),
    "rare": functools.partial(_draw_additive, 60_000, users=20_000, items=20_000),
    "tiny": functools.partial(_draw_census, 2_200),
    "bent": functools.partial(_draw_bent, 40_000),
    "visits": functools.partial(_draw_visits, 300_000),
    "visits_alone": functools.partial(_draw_visits, 300_000),  # the spec has no [events]
    "alike": functools.partial(_draw_alike, 300_000),
    "demo": None,
}
_BY_SHARE = """[split]
by = "share"
valid = 0.1
test = 0.1
"""
_BY_TIME = """[split]
by = "time"
column = "time"
valid = 0.1
test = 0.1
"""
_SEEN = """[events]
time = "time"
[[history]]
name = "seen"
of = ["user"]
columns = ["item"]
"""
#: Log → blocks of the spec for events.
_EVENTS = {"visits": EVENTS, "alike": _SEEN}
_SPEC = """[input]
format = "csv"
[label]
name = "click"
{split}[[dense]]
names = {dense}
raw = "float"
[[categorical]]
names = {categorical}
raw = "int"
"""


@dataclasses.dataclass(frozen=True)
class RegressionSettings(Settings):
    """The settings of the benchmark."""

    logs: tuple[str, ...] = flag("logs", tuple(LOGS), choices=tuple(LOGS))
    optimizers: tuple[str, ...] = flag("optimizers", OPTIMIZERS, choices=OPTIMIZERS)
    models: tuple[str, ...] = flag("models: values of the trainer's --model", ("dlrm",))
    seeds: int = flag("number of seeds, from 0 on; the table shows medians", 1, minimum=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    arguments, flags = split_flags(sys.argv[1:] if argv is None else argv)
    work = functools.partial(_run, flags=flags)
    return run_benchmark("regression", __doc__, RegressionSettings, work, arguments)


def _run(settings: RegressionSettings, flags: list[str]) -> int:
    table = Table("regression", "The trainer's defaults", METRICS, base="")
    systems_by_seed: list[list[System]] = [[] for _ in range(settings.seeds)]
    for log in settings.logs:
        split, oracle = _make_log(log)
        others = {"oracle": oracle, **fit_regression(split)}
        runs = itertools.product(settings.optimizers, settings.models, range(settings.seeds))
        for optimizer, model, seed in runs:
            case = f"{log}, {model}" if len(settings.models) > 1 else log
            run_flags = ["--binary_path", split, "--shuffle_training_set"]
            run_flags += ["--model", model, "--seed", seed]
            if optimizer != "default":
                run_flags += ["--optimizer", optimizer]
            run_flags += flags
            systems_by_seed[seed].append(_make_run(optimizer, case, run_flags, others))
    for systems in systems_by_seed:
        table.measure(systems, repeats=1)
    return table.finish()


def _make_run(optimizer: str, case: str, flags: Sequence[Any], others: dict[str, float]) -> System:
    """Make a run of ``train_torchrec.py``; its result are the last metrics of its log, and others.

    Args:
        optimizer: The name of the system.
        case: The case.
        flags: The trainer's flags.
        others: Metrics of other systems on the same log.
    """
    log_path = BUILD / "regression" / f"{case} {optimizer}"

    def result() -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for event in read_events(log_path / METRICS_FILE):  # the last evaluation counts
            if event["event"] == "evaluation" and event["split"] == "test":
                metrics |= event
            elif event["event"] == "baseline" and event["split"] == "test":
                if event["name"] == TREES:
                    metrics["trees"] = event["auroc"]
            elif event["event"] == "end":
                metrics["samples_per_s"] = event["samples_per_s"]
        return metrics | others

    return System(
        optimizer,
        case,
        [sys.executable, ROOT / "train_torchrec.py", *map(str, flags), "--log_path", log_path],
        before=lambda: shutil.rmtree(log_path, ignore_errors=True),
        result=result,
        timeout=24 * 3600,
    )


def _make_log(log: str) -> tuple[Path, float]:
    """Draw a log and run the ETL, once; return its splits and the oracle's AUROC on test."""
    draw = LOGS[log]
    if draw is None:
        raw = BUILD / "log-demo" / "raw"
        etl = BUILD / "log-demo" / "etl"

        def synthesize() -> None:
            run_etl("synthesize", "--output_path", raw, "--days", 5, "--rows_per_day", 250_000)
            run_etl("run", "--input_path", raw, "--output_path", etl)

        make_once(raw.parent, "a log of 5 x 250,000 rows", synthesize)
        summary = json.loads((raw / "synthetic.json").read_text())
        return etl / "criteo_binary" / "split", summary["oracle"]["test"]["auroc"]
    root = BUILD / f"log-{log}"
    logits, frame = draw()
    labels = np.random.default_rng(1).random(len(logits)) < 1 / (1 + np.exp(-logits))
    split = _BY_SHARE
    # Of a split at random, all rows estimate the AUROC best.
    tested = slice(None)
    if "time" in frame:  # clicks depend on earlier ones, so they were drawn together with the rows
        labels = frame["click"].to_numpy()
        frame = frame.drop(columns="click")
        split = _BY_TIME + _EVENTS.get(log, "")
        tested = slice(len(logits) * 9 // 10, None)

    def make() -> None:
        frame.assign(click=labels.astype(int)).to_csv(root / "log.csv", index=False)
        dense = [name for name in frame if name in ("price", "age", "hours")]
        categorical = [name for name in frame if name not in (*dense, "time")]
        spec = _SPEC.format(
            split=split, dense=json.dumps(dense), categorical=json.dumps(categorical)
        )
        (root / "spec.toml").write_text(spec)
        flags = ["--input_path", root / "log.csv", "--spec", root / "spec.toml"]
        run_etl("run", *flags, "--output_path", root / "out")

    make_once(root, f"{log}, {len(logits)} rows", make)
    return root / "out" / "criteo_binary" / "split", auroc(logits[tested], labels[tested])


def fit_regression(split: Path) -> dict[str, float]:
    """Fit scikit-learn's logistic regression to the rows of train; return its metrics on test."""
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import OneHotEncoder

    schema = TableSchema.read(split)
    train = pq.read_table(split / "train").to_pandas()
    test = pq.read_table(split / "test").to_pandas()
    train = train.iloc[-_MAX_FITTED_ROWS:]
    encoder = OneHotEncoder(handle_unknown="ignore").fit(train[list(schema.categorical)].to_numpy())

    def encode(rows: pd.DataFrame) -> Any:
        ids = encoder.transform(rows[list(schema.categorical)].to_numpy())
        return sparse.hstack([ids, rows[list(schema.dense)].to_numpy(float)], format="csr")

    model = LogisticRegression(max_iter=300).fit(encode(train), train[schema.label])
    logits = model.decision_function(encode(test))
    metrics = compute_metrics(logits, test[schema.label].to_numpy()).to_dict()
    return {f"regression_{name}": metrics[name] for name in ("auroc", "log_loss", "calibration")}


if __name__ == "__main__":
    sys.exit(main())
