"""``demo.html``: rows, speeds, learning curves, AUROC and calibration of the demo, in one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from demo.summary import read_training_log
from nvt_torchrec.base.files.atomic import write_text
from nvt_torchrec.base.pages.charts import Chart, Series, lines
from nvt_torchrec.base.pages.render import render


def write_page(paths: dict[str, Path], summary: dict[str, Any]) -> None:
    """Write the page from the demo's summary, its training log and its predictions."""
    events = read_training_log(paths["training_log"])
    charts = [*_curves(events, summary), _calibration(paths["predictions"])]
    template = Path(__file__).with_name("demo.html")
    write_text(paths["page"], render(template, summary=summary, charts=charts))


def _curves(events: list[dict[str, Any]], summary: dict[str, Any]) -> list[Chart]:
    train = [event for event in events if event["event"] == "train"]
    valid = [e for e in events if e["event"] == "evaluation" and e["split"] == "valid"]
    steps, oracle = train[-1]["step"], summary["oracle_auroc_valid"]
    loss = [
        Series("train", [(event["step"], event["loss"]) for event in train]),
        Series("valid", [(e["step"], e["log_loss"]) for e in valid], "second", dots=True),
    ]
    auroc = [
        Series("valid", [(e["step"], e["auroc"]) for e in valid], "second", dots=True),
        Series("oracle, valid", [(0, oracle), (steps, oracle)], "target"),
    ]
    return [
        lines(series, x="step", y=title, form="number")
        for title, series in (("log loss", loss), ("AUROC", auroc))
    ]


def _calibration(predictions: Path) -> Chart:
    """Draw the click rate in each tenth of the predictions of the last day."""
    table = pq.read_table(predictions)
    probability, label = table["probability"].to_numpy(), table["label"].to_numpy()
    tenths = np.array_split(np.argsort(probability, kind="stable"), 10)
    points = [(float(probability[rows].mean()), float(label[rows].mean())) for rows in tenths]
    highest = float(probability.max())
    series = [
        Series("tenths of the last day's predictions", points, dots=True),
        Series("perfect calibration", [(0, 0), (highest, highest)], "target"),
    ]
    return lines(series, x="mean prediction", y="click rate", form="share", from_zero=True)
