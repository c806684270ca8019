"""The picture of the demo: rows, learning curves, AUROC and calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from clicklog.files.atomic import atomic_path
from demo.summary import read_training_log

BLUE, RED, GREEN, GREY = "#4477aa", "#ee6677", "#228833", "#888888"


def draw(paths: dict[str, Path], summary: dict[str, Any]) -> None:
    """Draw ``demo.png``: learning curves, AUROC of model and oracle, calibration."""
    from matplotlib.figure import Figure  # slow to import, and needed at the end only

    figure = Figure(figsize=(12, 8), layout="constrained")
    (loss, auroc), (bars, calibration) = figure.subplots(2, 2)
    events = read_training_log(paths["training_log"])
    _loss(loss, events)
    _auroc_curve(auroc, events, summary)
    _auroc_bars(bars, summary)
    _calibration(calibration, paths)
    figure.suptitle(
        f"{summary['rows_in']:,} rows in, {summary['rows_out']:,} out, "
        f"{summary['rows_rejected']:,} rejected; ETL {summary['etl_rows_per_s']:,} rows/s, "
        f"training {summary['train_samples_per_s']:,} samples/s"
    )
    with atomic_path(paths["pictures"]) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def _loss(axes, events: list[dict[str, Any]]) -> None:
    train = [event for event in events if event["event"] == "train"]
    valid = [e for e in events if e["event"] == "evaluation" and e["split"] == "valid"]
    axes.plot([e["samples"] for e in train], [e["loss"] for e in train], color=GREY, label="train")
    axes.plot(
        [e["step"] * train[-1]["samples"] / train[-1]["step"] for e in valid],
        [e["log_loss"] for e in valid],
        "o-",
        color=BLUE,
        label="valid",
    )
    axes.set(title="Learning curve", xlabel="samples trained", ylabel="log loss")
    axes.legend()


def _auroc_curve(axes, events: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    valid = [e for e in events if e["event"] == "evaluation" and e["split"] == "valid"]
    axes.plot([e["step"] for e in valid], [e["auroc"] for e in valid], "o-", color=BLUE)
    axes.axhline(summary["oracle_auroc_valid"], color=GREEN, linestyle="--", label="oracle")
    axes.set(title="AUROC of valid while training", xlabel="step", ylabel="AUROC")
    axes.legend()


def _auroc_bars(axes, summary: dict[str, Any]) -> None:
    at = np.arange(2)
    for shift, key, color, label in (
        (-0.2, "auroc", BLUE, "model"),
        (0.2, "oracle_auroc", GREEN, "oracle"),
    ):
        values = [summary[f"{key}_{split}"] for split in ("valid", "test")]
        drawn = axes.bar(at + shift, values, 0.4, color=color, label=label)
        axes.bar_label(drawn, fmt="%.4f")
    axes.set_xticks(at, ["valid", "test"])
    axes.set(title="AUROC: model and oracle", ylim=(0.5, 1.0))
    axes.legend(loc="upper right")


def _calibration(axes, paths: dict[str, Path]) -> None:
    """Draw the click rate in each tenth of the predictions of the last day."""
    table = pq.read_table(paths["predictions"])
    probability, label = table["probability"].to_numpy(), table["label"].to_numpy()
    tenths = np.array_split(np.argsort(probability, kind="stable"), 10)
    axes.plot(
        [probability[tenth].mean() for tenth in tenths],
        [label[tenth].mean() for tenth in tenths],
        "o-",
        color=BLUE,
    )
    limit = float(probability.max())
    axes.plot([0, limit], [0, limit], color=GREY, linestyle=":")
    axes.set(
        title="Calibration of the last day's predictions",
        xlabel="predicted, by tenths",
        ylabel="clicked",
    )
