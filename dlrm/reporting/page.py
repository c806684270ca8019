"""``training.html``: how a run went, in one self-contained page made of its ``metrics.jsonl``.

``python -m dlrm.reporting.page DIRECTORY`` makes it again, also of a run that was killed or that
is still going on; training makes it at its end.
"""

from __future__ import annotations

import clicklog.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import argparse
import html
import json
import sys
from pathlib import Path
from typing import Any

from clicklog import charts
from clicklog.charts import Series
from clicklog.command_line import as_text
from clicklog.errors import BadInputError, run_command
from clicklog.files.atomic import write_text
from dlrm.settings.train_settings import TrainSettings

REPORT_FILE = "training.html"
METRICS_FILE = "metrics.jsonl"
#: Points of a chart at most; of more, every n-th is drawn, and the last.
_POINTS = 600

Events = list[dict[str, Any]]


def write_report(directory: Path | str) -> Path:
    """Write ``training.html`` beside the ``metrics.jsonl`` of a run; returns its path.

    Raises:
        BadInputError: there is no such file, or it has not the events of a run.
        OutputError: the page cannot be written.
    """
    path, metrics = Path(directory) / REPORT_FILE, Path(directory) / METRICS_FILE
    try:
        text = page(read_events(metrics))
    except (KeyError, TypeError) as error:
        raise BadInputError(
            f"{metrics}: not as this version of the trainer writes it ({error!r})"
        ) from error
    write_text(path, text)
    return path


def read_events(path: Path) -> Events:
    """The events of the last run in a file, those before it was resumed included.

    Steps that were trained again after a resume are there once. A line that a killed run did not
    finish is left out.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror or error}") from error
    found: Events = []
    start: dict[str, Any] | None = None
    fresh = False
    for line in lines:
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError):
            continue
        if kind == "start":
            start, fresh = event, True
        elif kind == "resume":
            fresh = False
            found = [one for one in found if one.get("step", 0) <= event["step"]]
            found = [one for one in found if one["event"] != "end"]
        elif fresh:  # not the run that the events so far are of
            found, fresh = [event], False
        else:
            found.append(event)
    if start is None:
        raise BadInputError(f"{path}: not the metrics of a training run")
    return [start, *([] if fresh else found)]


def page(events: Events) -> str:
    """The page as HTML; it loads nothing from elsewhere."""
    start = events[0]
    train = [one for one in events if one["event"] == "train"]
    evaluations = [one for one in events if one["event"] == "evaluation"]
    end = next((one for one in events if one["event"] == "end"), None)
    body = ["<h1>Training a DLRM</h1>", _head(start, train, evaluations, end)]
    if train:
        body.append(_curves(start, train, evaluations))
    body += [_metrics(start, evaluations), _plan(start["plan"]), _settings(start)]
    return charts.page("Training report", body)


def _head(
    start: dict[str, Any], train: Events, evaluations: Events, end: dict[str, Any] | None
) -> str:
    last = {one["split"]: one for one in evaluations}
    tiles = []
    for split in ("valid", "test"):
        auroc = last.get(split, {}).get("auroc")
        if auroc is not None:
            tiles.append((f"{auroc:.4f}", f"AUROC, {split}"))
    oracle = (start.get("oracle") or {}).get("test")
    if oracle:
        tiles.append((f"{oracle['auroc']:.4f}", "AUROC of the oracle, test"))
    if train:
        seconds = train[-1]["train_seconds"]
        speed = (end or train[-1])["samples_per_s"] or train[-1]["samples_per_s"]
        tiles += [
            (f"{train[-1]['step']:,}", f"of {start['total_steps']:,} steps"),
            (charts.shown(train[-1]["samples"], "count"), "samples trained"),
            (charts.shown(speed, "count"), "samples/s"),
            (f"{seconds:,.0f} s", "training, without evaluations"),
            (charts.size(max(one["memory_bytes"] for one in train)), "memory of rank 0"),
        ]
    ranks = start["world_size"]
    source = start["settings"]["binary_path"]
    if start["settings"]["dataset_type"] == "synthetic":
        source = "random rows in memory"
    what = f"{ranks} rank{'s' if ranks > 1 else ''} on {html.escape(start['device'])}; "
    unfinished = "" if end else " The run has not come to its end."
    return (
        f"<p class=faint>{what}<span class=mono>{html.escape(source)}</span>.{unfinished}</p>"
        + charts.tiles(tiles)
    )


def _curves(start: dict[str, Any], train: Events, evaluations: Events) -> str:
    valid = [one for one in evaluations if one["split"] == "valid"]
    oracle = (start.get("oracle") or {}).get("valid")
    last = train[-1]["step"]

    def target(name: str) -> list[Series]:
        if not oracle:
            return []
        return [Series("oracle, valid", [(0, oracle[name]), (last, oracle[name])], "target")]

    loss = [Series("train", _points(train, "loss"))]
    if valid:
        loss.append(Series("valid", _points(valid, "log_loss"), "second", dots=True))
    pictures = [charts.lines([*loss, *target("log_loss")], x="step", y="log loss", form="number")]
    if any(one["auroc"] is not None for one in valid):
        auroc = Series("valid", _points(valid, "auroc"), "second", dots=True)
        pictures.append(charts.lines([auroc, *target("auroc")], x="step", y="AUROC", form="number"))
    for key, name, form in (
        ("samples_per_s", "samples/s", "count"),
        ("data_wait", "waiting for data", "share"),
        ("lr", "learning rate", "count"),
    ):
        series = [Series(_NAMES[key], _points(train, key))]
        pictures.append(charts.lines(series, x="step", y=name, form=form, from_zero=True))
    memory = [(step, value / 2**30) for step, value in _points(train, "memory_bytes")]
    series = [Series("rank 0", memory)]
    pictures.append(charts.lines(series, x="step", y="GiB", form="count", from_zero=True))
    return f"<h2>Curves</h2><div class=charts>{''.join(pictures)}</div>"


_NAMES = {
    "samples_per_s": "all ranks",
    "data_wait": "share of the time between two reports, mean over the ranks",
    "lr": "of the last step before each report",
}


def _points(events: Events, key: str) -> list[tuple[float, float]]:
    found = [(one["step"], one[key]) for one in events if one[key] is not None]
    every = -(-len(found) // _POINTS)
    return found[:-1:every] + found[-1:] if every > 1 else found


def _metrics(start: dict[str, Any], evaluations: Events) -> str:
    if not evaluations:
        return ""
    oracle = start.get("oracle") or {}
    last = {one["split"]: one for one in evaluations}
    heads = ["split", "samples", "AUROC", "oracle's", "log loss", "oracle's", "normalized entropy"]
    heads += ["accuracy", "click rate", "mean prediction", "calibration"]
    rows = []
    for split, one in last.items():
        known = oracle.get(split, {})
        numbers = (one["auroc"], known.get("auroc"), one["log_loss"], known.get("log_loss"))
        numbers += (one["normalized_entropy"], one["accuracy"], one["positive_rate"])
        numbers += (one["mean_prediction"], one["calibration"])
        rows.append([split, f"{one['samples']:,}", *map(_number, numbers)])
    note = ""
    if oracle:
        note = (
            "<p class=faint>The log is synthetic: the oracle scores each row with the probability "
            "that its click was drawn with. No model does better, but by chance.</p>"
        )
    return f"<h2>Last evaluations</h2>{note}<div class=wide>{charts.table(heads, rows)}</div>"


def _plan(plan: dict[str, Any]) -> str:
    tables = plan["tables"]
    if not tables:
        return ""
    sizes = [sum(one["gpu"]) + sum(one["host"]) for one in tables]
    rows = [
        [
            html.escape(one["table"]),
            f"{one['rows']:,}",
            str(one["dim"]),
            charts.bar(size / max(sizes), charts.size(size)),
            one["sharding"].replace("_", "-"),
            one["kernel"].replace("_", " "),
            ", ".join(map(str, sorted(set(one["ranks"])))),
        ]
        for one, size in zip(tables, sizes, strict=True)
    ]
    ranks = plan["gib_per_rank"]
    has = f"Each rank has {plan['memory_gib']:.1f} GiB; its tables take "
    picture = ""
    if len(ranks) == 1:
        has += f"{charts.size(ranks[0] * 2**30)}."
    else:
        has += f"{charts.size(min(ranks) * 2**30)} to {charts.size(max(ranks) * 2**30)}."
        labels = list(map(str, range(len(ranks))))
        picture = charts.columns(labels, ranks, x="rank", y="GiB of tables", form="count")
    heads = ["table", "rows", "dim", "size, with optimizer and buffers", "sharding", "kernel"]
    return (
        f"<h2>Sharding plan</h2><p class=faint>{has}</p><div class=narrow>{picture}</div>"
        f"<div class=wide>{charts.table([*heads, 'ranks'], rows)}</div>"
    )


def _settings(start: dict[str, Any]) -> str:
    """The settings that were given; the defaults of the others are below a fold."""
    given, others = [], []
    for name, value in start["settings"].items():
        value = tuple(value) if isinstance(value, list) else value
        field = TrainSettings.__dataclass_fields__.get(name)
        shown = html.escape("–" if value is None else str(as_text(value)))
        row = f"<tr><td>--{html.escape(name)}</td><td class=words>{shown}</td></tr>"
        is_default = field is not None and value == field.default
        (others if is_default else given).append(row)
    return (
        f"<h2>Settings</h2><table><tbody>{''.join(given)}</tbody></table>"
        f"<details><summary class=faint>{len(others)} settings with their defaults</summary>"
        f"<table><tbody>{''.join(others)}</tbody></table></details>"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.5f}"


def main(argv: list[str] | None = None) -> int:
    """``python -m dlrm.reporting.page``."""

    def run() -> None:
        parser = argparse.ArgumentParser(prog="python -m dlrm.reporting.page", description=__doc__)
        parser.add_argument("directory", help="of the run's metrics.jsonl: its --log_path")
        print(write_report(parser.parse_args(argv).directory))

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
