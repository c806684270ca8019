"""What a run leaves to look at: training.html, and TensorBoard's event files."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import struct

import numpy as np
import pytest
import torch
from tensorboardX.proto.event_pb2 import Event

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.manifest import InputFile
from nvt_torchrec.models.metrics import Metrics, compute_metrics
from nvt_torchrec.training.baselines.baselines import REGRESSION, TREES
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.reporting.metrics_log import MetricsLog
from nvt_torchrec.training.reporting.page import read_events, write_report
from nvt_torchrec.training.reporting.progress import Progress
from nvt_torchrec.training.settings.train_settings import parse_settings
from tests.etl.test_report import Page
from tests.layout import find_overflows
from tests.manifests import ROWS, write_manifest
from tests.training.runs import EXAMPLE_SGD, events, train_here

LINE = ("polyline", "points")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run on data with a manifest and a workflow; terminal.txt has what it said."""
    directory = tmp_path_factory.mktemp("report")
    output = directory / "etl"
    split = output / "criteo_binary" / "split"
    split.parent.mkdir(parents=True)
    split.symlink_to(data)
    rows = {"train": 929, "valid": 333, "test": 201}
    counts = {split: {"rows": n, "positives": n // 4} for split, n in rows.items()}
    raw = directory / "raw" / "day_0"
    inputs = [InputFile(0, str(raw), {}, ROWS, "")]
    write_manifest(output / "manifest.json", inputs=inputs, splits=counts)
    (output / "workflow").mkdir()
    log = directory / "log"
    log.mkdir()
    flags = [*EXAMPLE_SGD, f"--binary_path={split}", "--batch_size=32", "--learning_rate=0.1"]
    flags += ["--tensorboard", "--validation_freq_within_epoch=10", f"--log_path={log}"]
    logger, terminal = logging.getLogger("nvt_torchrec"), logging.FileHandler(log / "terminal.txt")
    logger.addHandler(terminal)
    logger.setLevel("INFO")
    train_here(*flags, f"--save_checkpoint_path={directory / 'end'}")
    logger.removeHandler(terminal)
    logger.setLevel("NOTSET")
    return log


def test_the_page_is_whole_and_says_what_happened(run):
    page = Page((run / "training.html").read_text())
    lines_drawn = [value for tag, name, value in page.attributes if (tag, name) == LINE]
    assert len(lines_drawn) == 7 + 1 + 1, "seven pictures; valid's loss, diagonal"
    assert not {"src", "href"} & {name for _, name, _ in page.attributes}, "it loads nothing"
    last = {event["split"]: event for event in events(run, "evaluation")}
    for split in ("valid", "test"):
        assert f"{last[split]['auroc']:.5f}" in page.texts
    assert "of 30 steps" in page.texts
    assert page.texts.count("table-wise") == 4
    assert "--learning_rate" in page.texts
    assert "; split by days: train 0, valid none, test none" in page.texts
    assert page.texts[page.texts.index("; label ") + 1] == "label"
    assert "The run has not finished." not in " ".join(page.texts)
    command = next(text for text in page.texts if "inference bundle --workflow" in text)
    assert f"etl/workflow --checkpoint {run.parent / 'end'} --output BUNDLE" in command
    assert f"next: {command}\n" in (run / "terminal.txt").read_text()
    (importance,) = events(run, "importance")
    columns = importance["columns"]
    names = [name for name in page.texts if name in columns]
    assert names == sorted(columns, key=columns.get, reverse=True)


def test_the_model_stands_beside_the_regression_and_warnings_below(run, tmp_path):
    kept = [e for e in read_events(run / "metrics.jsonl") if e["event"] != "warning"]
    warning = {"event": "warning", "step": 7, "text": "it <is> odd", "remedy": "look"}

    def lines_after_the_title(gain: float) -> str:
        for event in kept:
            if event["event"] == "evaluation":
                event["auroc"] = regression + gain
        lines = map(json.dumps, [*kept, warning])
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        return re.sub(r"<.*?>", "", write_report(tmp_path).read_text().split("</h1>")[1])

    (regression,) = (
        e["auroc"] for e in kept if e.get("name") == REGRESSION and e["split"] == "test"
    )
    assert "On test, dlrm is better than the logistic regression" in lines_after_the_title(0.01)
    assert "On test, dlrm is as good as the logistic" in lines_after_the_title(-0.0009)
    text = lines_after_the_title(-0.01)
    assert f"worse than the logistic regression: AUROC {regression - 0.01:.4f} against" in text
    assert text.index("worse than") < text.index("Warning: it &lt;is&gt; odd. Remedy: look.")
    beside = next(e for e in kept if e.get("name") == REGRESSION and e["split"] == "test")
    kept.append({**beside, "name": TREES, "auroc": regression + 0.05})
    text = lines_after_the_title(0.01)
    assert "dlrm is better than the logistic regression" in text
    assert f"It is worse than boosted trees: AUROC {regression + 0.01:.4f} against" in text
    kept = [event for event in kept if event["event"] not in ("baseline", "end")]
    text = lines_after_the_title(0)
    assert "no baseline has been fitted yet. The run has not finished." in text


@pytest.mark.parametrize("model", ["dlrm", "deepfm", "dcn_v2", "final_mlp", "din", "own:build"])
def test_the_page_names_the_model(model, run, tmp_path):
    """It said DLRM, whatever was trained."""
    start, *rest = read_events(run / "metrics.jsonl")
    start["settings"]["model"] = model
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [start, *rest])))
    text = write_report(tmp_path).read_text()
    assert f"<title>Training report of {model}: " in text
    assert f"<h1>Training {model}</h1>" in text
    assert f"On test, {model} is " in text
    assert "DLRM" not in text


def test_the_last_line_names_the_baselines_that_are_better(run, tmp_path, caplog):
    random = np.random.default_rng(5)
    labels = (random.random(20_000) < 0.2).astype(np.float32)

    def metrics_of(signal: float) -> Metrics:
        return compute_metrics(signal * labels + random.normal(0, 1, len(labels)) - 2, labels)

    bad, fair, good = map(metrics_of, (0.5, 1.0, 1.5))
    group = Group(0, 1, 1, torch.device("cpu"), None)
    given = ["--binary_path=split", "--model=deepfm", "--epochs=1", f"--log_path={tmp_path}"]
    settings = parse_settings(given)
    start, *_ = read_events(run / "metrics.jsonl")

    def end(result: Metrics, **beside: Metrics) -> str:
        """Return the last line of a run whose baselines have these metrics on test."""
        caplog.clear()
        log = MetricsLog(tmp_path)
        progress = Progress(settings, group, log, 10)
        log.write(start["event"], **{key: start[key] for key in start if key != "event"})
        names = {"regression": REGRESSION, "trees": TREES}
        baselines = {("test", names[key]): {"label": values} for key, values in beside.items()}
        progress.report_end({"test": {"label": result}}, baselines, "", ["WARNING: odd"])
        return caplog.messages[-1]

    with caplog.at_level("INFO", "nvt_torchrec"):
        line = end(bad, regression=fair, trees=good)
        assert line == (
            f"on test, deepfm is still worse than the logistic regression ({fair.auroc:.4f}) and "
            f"boosted trees ({good.auroc:.4f}): its AUROC is {bad.auroc:.4f}"
        )
        line = end(fair, regression=bad, trees=good)
        assert "worse than boosted trees (" in line
        assert end(good, regression=bad, trees=good) == "WARNING: odd"
        assert end(good) == "WARNING: odd"
        few = dataclasses.replace(fair, samples=2_000, positives=400, auroc=bad.auroc + 0.01)
        assert end(bad, regression=few) == "WARNING: odd", "by chance: of other rows"


def test_nothing_is_cut_or_scrolls_sideways(run, tmp_path):
    assert find_overflows(run / "training.html", tmp_path) == []


def test_a_run_that_was_killed_and_resumed(tmp_path):
    log = MetricsLog(tmp_path)

    def step(number: int, loss: float) -> None:
        log.write("train", step=number, loss=loss)

    log.write("start", settings={"seed": 1})
    for number in (1, 2, 3):
        step(number, 0.5)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "st\n')  # killed
    log.write("start", settings={"seed": 2})
    log.write("resume", step=2)
    step(3, 0.4)
    start, *kept = read_events(tmp_path / "metrics.jsonl")
    assert start["settings"] == {"seed": 2}
    assert [(one["step"], one["loss"]) for one in kept] == [(1, 0.5), (2, 0.5), (3, 0.4)]
    log.write("start", settings={"seed": 3})  # another run, in the same directory
    step(1, 0.7)
    start, *kept = read_events(tmp_path / "metrics.jsonl")
    assert start["settings"] == {"seed": 3}
    assert [(one["step"], one["loss"]) for one in kept] == [(1, 0.7)]


def test_a_run_that_goes_on_has_a_page_too(run, tmp_path):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:8]))
    assert "The run has not finished." in write_report(tmp_path).read_text()
    (tmp_path / "metrics.jsonl").write_text(lines[0])  # nothing is trained yet
    Page(write_report(tmp_path).read_text())
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(BadInputError, match="not the metrics of a training run"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"event": "start", "settings": {}}')
    with pytest.raises(BadInputError, match="not in the format of this version of the trainer"):
        write_report(tmp_path)


def test_tensorboard_events(run):
    (path,) = run.glob("events.out.tfevents.*")
    data, at = path.read_bytes(), 0
    curves: dict[str, dict[int, float]] = {}
    while at < len(data):  # TFRecords: length, its checksum, an event, its checksum
        (size,) = struct.unpack("<Q", data[at : at + 8])
        event = Event.FromString(data[at + 12 : at + 12 + size])
        for value in event.summary.value:
            curves.setdefault(value.tag, {})[event.step] = value.simple_value
        at += 16 + size
    trained = {event["step"]: event["loss"] for event in events(run, "train")}
    assert curves["train/loss"] == pytest.approx(trained, rel=1e-6)
    valid = [event for event in events(run, "evaluation") if event["split"] == "valid"]
    assert curves["valid/auroc"] == pytest.approx({o["step"]: o["auroc"] for o in valid}, rel=1e-6)
