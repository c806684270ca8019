"""Make ``training.html``, a self-contained report of a run, from its ``metrics.jsonl``.

Training writes it after evaluations of valid, at most once a minute, and at its end.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from nvt_torchrec.base.command_line import format_value
from nvt_torchrec.base.errors import BadInputError, adapt_commands
from nvt_torchrec.base.files.atomic import write_text
from nvt_torchrec.base.pages import render
from nvt_torchrec.base.pages.charts import Chart, Series, lines
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.training.reporting.metrics_log import METRICS_FILE, TITLES, name_evaluation
from nvt_torchrec.training.reporting.verdict import describe_result
from nvt_torchrec.training.settings.train_settings import TrainSettings

REPORT_FILE = "training.html"
#: The largest number of points of a curve. Of more points, every n-th one and the last are drawn.
_MAX_POINTS = 600


@dataclasses.dataclass(frozen=True)
class _Curve:
    """A curve over the training steps.

    Attributes:
        key: The key of its values in ``train`` events.
        title: The title of the y axis.
        form: The format of the values, for :func:`base.pages.charts.lines`.
        name: The name of the line.
    """

    key: str
    title: str
    form: str
    name: str


_CURVES = (
    _Curve("samples_per_s", "samples/s", "count", "all ranks"),
    _Curve("data_wait", "waiting for data", "share", "share of the time, mean over the ranks"),
    _Curve("lr", "learning rate", "count", "of the last step before each report"),
    _Curve("memory_gib", "GiB", "count", "rank 0"),
)

Events = list[dict[str, Any]]


def write_report(directory: Path | str) -> Path:
    """Write ``training.html`` next to the ``metrics.jsonl`` of a run.

    Returns:
        The path of the page.

    Raises:
        BadInputError: The file does not hold the events of a run.
        OutputError: The page cannot be written.
    """
    path = Path(directory) / REPORT_FILE
    metrics = Path(directory) / METRICS_FILE
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

    If steps were trained again after a resume, only their last events are returned. An incomplete
    line, which a killed run leaves, is skipped.

    Raises:
        BadInputError: The file has no event that starts a run.
    """
    start: dict[str, Any] | None = None
    run: Events = []  # the events since the last start
    earlier: Events = []  # the events of the last start before it that has any
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError):
            continue
        if kind == "start":
            start = event
            earlier = run or earlier
            run = []
        elif kind == "resume":
            run = []
            for old in earlier:
                if old["event"] != "end" and old.get("step", 0) <= event["step"]:
                    run.append(old)
        else:
            run.append(event)
    if start is None:
        raise BadInputError(f"{path}: not the metrics of a training run")
    return [start, *run]


def page(events: Events) -> str:
    """Make the page as HTML that loads nothing from elsewhere."""
    start, *rest = events
    events_by_kind: defaultdict[str, Events] = defaultdict(list)
    for event in rest:
        events_by_kind[event["event"]].append(event)
    end = events_by_kind["end"][0] if events_by_kind["end"] else None
    given, defaults = _split_settings(start["settings"])
    # Of several events with the same key, the last one counts.
    last = {_name_event(event): event for event in events_by_kind["evaluation"]}
    baselines = {(_name_event(event), event["name"]): event for event in events_by_kind["baseline"]}
    importance = {event["label"]: event for event in events_by_kind["importance"]}
    titles = dict(TITLES)
    if not any("gauc" in event for event in last.values()):
        del titles["gauc"]
    charts = draw_charts(events_by_kind["train"], events_by_kind["evaluation"])
    return render(
        Path(__file__).with_name("training.html"),
        start=start,
        verdict=_describe(start["settings"]["model"], last, baselines, end),
        importance=list(importance.values()),
        next=list_next_commands(start["settings"], end["checkpoint"]) if end else [],
        warnings=events_by_kind["warning"],
        end=end,
        train=events_by_kind["train"],
        last=last,
        titles=titles,
        results=last | {", ".join(names): event for names, event in baselines.items()},
        quality=charts[: -len(_CURVES)],
        speed=charts[-len(_CURVES) :],
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
    """Return the first sentences of the page, which compare the model with the baselines.

    They are about test if it was evaluated, otherwise about all evaluated splits.

    Args:
        model: The value of ``--model``.
        last: The last evaluations, by the names of their splits and labels.
        baselines: The events of the baselines, by the same name and the name of the baseline.
        end: The run's ``end`` event; None if the run has not ended.
    """
    final = {name: event for name, event in last.items() if event["split"] == "test"} or last
    sentences = []
    for name, event in final.items():
        baselines_of_name = {}
        for (evaluation, baseline), values in baselines.items():
            if evaluation == name:
                baselines_of_name[baseline] = values
        sentences.append(describe_result(model, name, event, baselines_of_name))
    if end is None:
        sentences.append("The run has not finished.")
    elif end["advice"]:
        advice = end["advice"]
        sentences.append(f"{advice[0].upper()}{advice[1:]}.")
    return " ".join(filter(None, sentences))


def _name_event(event: dict[str, Any]) -> str:
    """Return the name of an evaluation: its split, and its label if several are trained."""
    return name_evaluation(event["split"], event.get("label", ""))


def list_next_commands(settings: Mapping[str, Any], checkpoint: str | None) -> list[str]:
    """Return the commands that use a model.

    Args:
        settings: The settings of the run, by name.
        checkpoint: The checkpoint; None if the model is not saved.

    Returns:
        The commands; empty without a checkpoint or without the workflow of the data.
    """
    workflow = EtlOutput.from_splits(settings["binary_path"]).workflow
    if not checkpoint or not workflow.is_dir():
        return []
    flags = f"--workflow {workflow} --checkpoint {checkpoint}"
    if ":" in settings["model"]:  # a custom model is only imported if the caller names it
        flags += f" --model {settings['model']}"
    commands = (
        f"bundle {flags} --output BUNDLE",
        "predict --bundle BUNDLE --input RAW --output SCORES",
    )
    return [adapt_commands(f"python -m inference {command}") for command in commands]


def draw_charts(train: Events, evaluations: Events) -> list[Chart]:
    """Return the charts of a run.

    The first charts show quality: the loss, and for each evaluated label the AUROC and the
    calibration. The others show :data:`_CURVES`.
    """
    if not train:
        return []
    loss = Series("train", _list_points(train, "loss"))
    labels = list(dict.fromkeys(event.get("label", "") for event in evaluations)) or [""]
    charts = []
    if len(labels) > 1:
        charts.append(lines([loss], x="step", y="loss", form="number"))
    for label in labels:
        evaluations_of_label = [event for event in evaluations if event.get("label", "") == label]
        # The training loss is the sum over all labels, so it is only comparable with one label.
        charts += _draw_label(evaluations_of_label, [] if label else [loss])
    train = [{**event, "memory_gib": event["memory_bytes"] / 2**30} for event in train]
    for curve in _CURVES:
        series = [Series(curve.name, _list_points(train, curve.key))]
        charts.append(lines(series, x="step", y=curve.title, form=curve.form, from_zero=True))
    return charts


def _draw_label(evaluations: Events, loss: list[Series]) -> list[Chart]:
    """Return the charts of a label's evaluations.

    Args:
        evaluations: The evaluations, oldest first.
        loss: The training loss, to draw in the same chart as that of valid; empty for none.
    """
    valid = [event for event in evaluations if event["split"] == "valid"]
    name = _name_event(valid[-1]) if valid else "valid"
    if valid:
        loss = [*loss, Series(name, _list_points(valid, "log_loss"), "second", dots=True)]
    charts = []
    if any(series.points for series in loss):
        charts = [lines(loss, x="step", y=TITLES["log_loss"], form="number")]
    if any(event["auroc"] is not None for event in valid):
        auroc = Series(name, _list_points(valid, "auroc"), "second", dots=True)
        charts.append(lines([auroc], x="step", y=TITLES["auroc"], form="number"))
    points = evaluations[-1].get("calibration_curve") if evaluations else None
    if points:
        highest = max(map(max, points))
        series = [
            Series(f"tenths of {_name_event(evaluations[-1])}", points, "second", dots=True),
            Series("perfect calibration", [(0, 0), (highest, highest)], "target"),
        ]
        charts.append(
            lines(series, x="mean prediction", y="click rate", form="share", from_zero=True)
        )
    return charts


def _list_points(events: Events, key: str) -> list[tuple[float, float]]:
    """Return the (step, value) points of a key's curve, at most :data:`_MAX_POINTS` and one."""
    # A run that returns to its best model evaluates that step again; the last value counts.
    value_by_step = {event["step"]: event[key] for event in events if event[key] is not None}
    points = sorted(value_by_step.items())
    every = math.ceil(len(points) / _MAX_POINTS)
    if every <= 1:
        return points
    return points[:-1:every] + points[-1:]


def _split_settings(settings: dict[str, Any]) -> tuple[list[tuple[str, str]], ...]:
    """Return the settings that differ from their defaults, and the others, as text."""
    given: list[tuple[str, str]] = []
    defaults: list[tuple[str, str]] = []
    for name, value in settings.items():
        value = tuple(value) if isinstance(value, list) else value
        field = TrainSettings.__dataclass_fields__.get(name)
        text = "–" if value is None else str(format_value(value))
        if field is not None and value == field.default:
            defaults.append((name, text))
        else:
            given.append((name, text))
    return given, defaults
