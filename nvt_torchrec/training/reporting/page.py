"""``training.html``: how a run went, in one self-contained page made of its ``metrics.jsonl``.

Training writes it after evaluations of valid, at most every minute, and at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from nvt_torchrec.base.command_line import as_text
from nvt_torchrec.base.errors import BadInputError, as_called
from nvt_torchrec.base.files.atomic import write_text
from nvt_torchrec.base.pages import render
from nvt_torchrec.base.pages.charts import Chart, Series, lines
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.training.reporting.metrics_log import METRICS_FILE, TITLES, name_of
from nvt_torchrec.training.reporting.verdict import describe_result
from nvt_torchrec.training.settings.train_settings import TrainSettings

REPORT_FILE = "training.html"
#: Points of a curve at most; of more, every n-th and the last are drawn.
_POINTS = 600
#: Curves over the training steps: key of the events, title of the y axis, form, name of the line.
_CURVES = (
    ("samples_per_s", "samples/s", "count", "all ranks"),
    ("data_wait", "waiting for data", "share", "share of the time, mean over the ranks"),
    ("lr", "learning rate", "count", "of the last step before each report"),
    ("memory_gib", "GiB", "count", "rank 0"),
)

Events = list[dict[str, Any]]


def write_report(directory: Path | str) -> Path:
    """Write ``training.html`` beside the ``metrics.jsonl`` of a run.

    Returns:
        The path of the page.

    Raises:
        BadInputError: The file does not hold the events of a run.
        OutputError: The page cannot be written.
    """
    path, metrics = Path(directory) / REPORT_FILE, Path(directory) / METRICS_FILE
    try:
        text = page(read_events(metrics))
    except (KeyError, TypeError, UndefinedError) as error:
        raise BadInputError(
            f"{metrics}: not in the format of this version of the trainer ({error!r})",
            "make the page with the version that wrote the file",
        ) from error
    write_text(path, text)
    return path


def read_events(path: Path) -> Events:
    """Read the events of the last run in a file, including those from before it was resumed.

    The events of steps that were trained again after a resume are returned once. An incomplete
    line, which a killed run leaves, is skipped.

    Raises:
        BadInputError: The file has no event that starts a run.
    """
    start: dict[str, Any] | None = None
    run: Events = []
    earlier: Events = []  # of the last run that had events before this start
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError):
            continue
        if kind == "start":
            start, earlier, run = event, run or earlier, []
        elif kind == "resume":
            kept = (e for e in earlier if e["event"] != "end")
            run = [e for e in kept if e.get("step", 0) <= event["step"]]
        else:
            run.append(event)
    if start is None:
        raise BadInputError(f"{path}: not the metrics of a training run")
    return [start, *run]


def page(events: Events) -> str:
    """Make the page as HTML; it loads nothing from elsewhere."""
    start, *rest = events
    of_kind = {
        kind: [event for event in rest if event["event"] == kind]
        for kind in ("train", "evaluation", "baseline", "importance", "warning", "end")
    }
    end = of_kind["end"][0] if of_kind["end"] else None
    given, defaults = _split_settings(start["settings"])
    last = {_name_of(event): event for event in of_kind["evaluation"]}
    baselines = {(_name_of(event), event["name"]): event for event in of_kind["baseline"]}
    titles = dict(TITLES)
    if not any("gauc" in event for event in last.values()):
        del titles["gauc"]
    drawn = curves(of_kind["train"], of_kind["evaluation"])
    return render(
        Path(__file__).with_name("training.html"),
        start=start,
        verdict=_describe(start["settings"]["model"], last, baselines, end),
        importance=list({event["label"]: event for event in of_kind["importance"]}.values()),
        next=list_next_commands(start["settings"], end["checkpoint"]) if end else [],
        warnings=of_kind["warning"],
        end=end,
        train=of_kind["train"],
        last=last,
        titles=titles,
        results=last | {", ".join(names): event for names, event in baselines.items()},
        quality=drawn[: -len(_CURVES)],
        speed=drawn[-len(_CURVES) :],
        table_sizes=[sum(table["gpu"]) + sum(table["host"]) for table in start["plan"]["tables"]],
        given=given,
        defaults=defaults,
    )


def _describe(
    model: str,
    last: Mapping[str, dict[str, Any]],
    baselines: Mapping[tuple[str, str], dict[str, Any]],
    end: dict[str, Any] | None,
) -> str:
    """Return what the page says first: the model beside the baselines, on test if it has one.

    Args:
        model: What ``--model`` says.
        last: The last evaluations, by the names of splits and labels.
        baselines: Those of the baselines, by the same names and their own.
        end: The run's last event; None if it goes on.
    """
    final = {name: event for name, event in last.items() if event["split"] == "test"} or last
    sentences = []
    for name, event in final.items():
        beside = {other: values for (where, other), values in baselines.items() if where == name}
        sentences.append(describe_result(model, name, event, beside))
    if end is None:
        sentences.append("The run has not finished.")
    elif end["advice"]:
        sentences.append(f"{end['advice'][0].upper()}{end['advice'][1:]}.")
    return " ".join(filter(None, sentences))


def _name_of(event: dict[str, Any]) -> str:
    return name_of(event["split"], event.get("label", ""))


def list_next_commands(settings: Mapping[str, Any], checkpoint: str | None) -> list[str]:
    """Return the commands that use a model; none if it or the workflow of its data is not saved.

    ``settings`` are those of the run, by name.
    """
    workflow = EtlOutput.from_splits(settings["binary_path"]).workflow
    if not checkpoint or not workflow.is_dir():
        return []
    of_model = f"--workflow {workflow} --checkpoint {checkpoint}"
    if ":" in settings["model"]:  # an own one, which nothing imports unless it is named
        of_model += f" --model {settings['model']}"
    commands = (
        f"bundle {of_model} --output BUNDLE",
        "predict --bundle BUNDLE --input RAW --output SCORES",
    )
    return [as_called(f"python -m inference {command}") for command in commands]


def curves(train: Events, evaluations: Events) -> list[Chart]:
    """Return the charts of a run: loss, AUROC and calibration if evaluated, then speeds, sizes."""
    if not train:
        return []
    loss = Series("train", _points(train, "loss"))
    labels = dict.fromkeys(event.get("label", "") for event in evaluations)
    charts = [] if len(labels) < 2 else [lines([loss], x="step", y="loss", form="number")]
    for label in labels or [""]:
        of_label = [event for event in evaluations if event.get("label", "") == label]
        charts += _curves_of_label(of_label, [] if label else [loss])
    train = [{**event, "memory_gib": event["memory_bytes"] / 2**30} for event in train]
    for key, title, form, name in _CURVES:
        series = [Series(name, _points(train, key))]
        charts.append(lines(series, x="step", y=title, form=form, from_zero=True))
    return charts


def _curves_of_label(evaluations: Events, loss: list[Series]) -> list[Chart]:
    """Return the charts of a label's evaluations, beside the loss of training."""
    valid = [event for event in evaluations if event["split"] == "valid"]
    name = _name_of(valid[-1]) if valid else "valid"
    if valid:
        loss = [*loss, Series(name, _points(valid, "log_loss"), "second", dots=True)]
    charts = []
    if any(series.points for series in loss):
        charts = [lines(loss, x="step", y=TITLES["log_loss"], form="number")]
    if any(event["auroc"] is not None for event in valid):
        auroc = Series(name, _points(valid, "auroc"), "second", dots=True)
        charts.append(lines([auroc], x="step", y=TITLES["auroc"], form="number"))
    if evaluations and (points := evaluations[-1].get("calibration_curve")):
        highest = max(map(max, points))
        series = [
            Series(f"tenths of {_name_of(evaluations[-1])}", points, "second", dots=True),
            Series("perfect calibration", [(0, 0), (highest, highest)], "target"),
        ]
        charts.append(
            lines(series, x="mean prediction", y="click rate", form="share", from_zero=True)
        )
    return charts


def _points(events: Events, key: str) -> list[tuple[float, float]]:
    # a run that went back to its best model evaluates that step again
    found = {event["step"]: event[key] for event in events if event[key] is not None}
    points = sorted(found.items())
    every = -(-len(points) // _POINTS)
    return points[:-1:every] + points[-1:] if every > 1 else points


def _split_settings(settings: dict[str, Any]) -> tuple[list[tuple[str, str]], ...]:
    """Return the settings that differ from their defaults and those that do not, as text."""
    given: list[tuple[str, str]] = []
    defaults: list[tuple[str, str]] = []
    for name, value in settings.items():
        value = tuple(value) if isinstance(value, list) else value
        field = TrainSettings.__dataclass_fields__.get(name)
        is_default = field is not None and value == field.default
        text = "–" if value is None else str(as_text(value))
        (defaults if is_default else given).append((name, text))
    return given, defaults
