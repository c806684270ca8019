"""The log of a training run: a line per interval, a final table, and ``metrics.jsonl``."""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.files.atomic import output_errors
from nvt_torchrec.models.metrics import ByLabel, Metrics

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

METRICS_FILE = "metrics.jsonl"
_REMEDY = "choose a writable --log_path"
#: The titles of the metrics on the page, by the fields of Metrics.
TITLES = {
    "samples": "samples",
    "auroc": "AUROC",
    "gauc": "GAUC",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "accuracy": "accuracy",
    "positive_rate": "click rate",
    "mean_prediction": "mean prediction",
    "calibration": "calibration",
}
#: The metrics that the log does not show.
_PAGE_ONLY = ("samples", "positive_rate", "mean_prediction")


def set_up_logging() -> None:
    """Log to stderr: progress on rank 0, warnings on all ranks."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    level = logging.INFO if int(os.environ.get("RANK", 0)) == 0 else logging.WARNING
    logging.getLogger("nvt_torchrec").setLevel(level)


class MetricsLog:
    """``metrics.jsonl`` in a directory: one JSON object per line, appended and flushed.

    The objects have an ``event``:

    - ``start``: settings, model, plan, data (the names of log, label and split), steps and rows;
    - ``train``: step, epoch, samples, loss, lr, samples_per_s (of all ranks) and
      samples_per_s_per_rank, data_wait (share of the time that ranks waited for their loaders),
      memory_bytes (rank 0), eta_s, train_seconds;
    - ``evaluation``: step, epoch, split, label (if several are trained: an event for each) and the
      fields of :class:`models.metrics.Metrics`, seconds;
    - ``baseline``: split, label, name and the same fields (:mod:`training.baselines.baselines`);
    - ``importance``: label, and for each of the ``columns`` the drop of AUROC if its values are
      permuted (:func:`training.loop.finish.measure_importance`);
    - ``warning``: step, text and remedy (:mod:`training.reporting.learning_check`);
    - ``continue``: checkpoint and new_rows, the number of new table rows;
    - ``resume``: step and checkpoint;
    - ``end``: step, samples, train_seconds, samples_per_s, checkpoint, advice (or "").

    Attributes:
        directory: The directory of the file; None on ranks other than 0, which write nothing.

    Args:
        directory: The directory of the file, or None.
        tensorboard: Whether to also write the numbers of ``train`` and ``evaluation`` as
            TensorBoard's events.
        holds: Whether to hold the objects in memory, for :meth:`write_held` of another log.

    Raises:
        OutputError: The file cannot be written.
    """

    def __init__(
        self, directory: Path | None, *, tensorboard: bool = False, holds: bool = False
    ) -> None:
        self.directory = directory
        self._held: list[tuple[str, dict[str, Any]]] | None = [] if holds else None
        self._tensorboard = _open_tensorboard(directory) if directory and tensorboard else None

    def write(self, event: str, **values: Any) -> None:
        """Append an object."""
        if self._held is not None:
            self._held.append((event, values))
        if self.directory is None:
            return
        path = self.directory / METRICS_FILE
        with output_errors(path, _REMEDY):
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **values}, allow_nan=False) + "\n")
        if self._tensorboard and event in ("train", "evaluation"):
            prefix = values.get("split", event)
            if values.get("label"):
                prefix += f"/{values['label']}"
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("step", "epoch"):
                    self._tensorboard.add_scalar(f"{prefix}/{name}", value, values["step"])
            self._tensorboard.flush()

    def write_held(self, other: MetricsLog) -> None:
        """Append the objects that another log holds."""
        for event, values in other._held or ():
            self.write(event, **values)


def _open_tensorboard(directory: Path) -> SummaryWriter:
    """Open the file of TensorBoard's events; raise OutputError if it cannot be written."""
    from tensorboardX import SummaryWriter  # here, because the import takes seconds

    with output_errors(directory, _REMEDY):
        return SummaryWriter(str(directory))


def format_interval(values: Mapping[str, Any], total_steps: int, epoch: str) -> str:
    """Format an interval, given as the values of its ``train`` event, as a line."""
    eta = datetime.timedelta(seconds=round(values["eta_s"]))
    return (
        f"step {values['step']:,}/{total_steps:,}  epoch {epoch}"
        f"  loss {values['loss']:.5f}  lr {values['lr']:g}"
        f"  {values['samples_per_s']:,.0f} samples/s"
        f" ({values['samples_per_s_per_rank']:,.0f} per rank)"
        f"  data {100 * values['data_wait']:.0f} %  memory {values['memory_bytes'] / 2**30:.2f} GiB"
        f"  ETA {eta}"
    )


def name_evaluation(split: str, label: str = "") -> str:
    """Return the name of an evaluation; ``label`` is "" if a single label is trained."""
    return f"{split} ({label})" if label else split


def format_evaluation(name: str, metrics: Metrics) -> str:
    """Format an evaluation as a line."""
    values = "  ".join(f"{title} {value}" for title, value in _format_values(metrics).items())
    return f"{name}: {values}  ({metrics.samples:,} samples, {metrics.positives:,} clicks)"


def format_table(results: Mapping[str, ByLabel]) -> str:
    """Format the final metrics of all splits as a table with a row for each split and label."""
    titles: list[str] = []
    labels = set()
    rows = []
    for split, metrics_by_label in results.items():
        for label, metrics in metrics_by_label.items():
            values = _format_values(metrics)
            titles = titles or list(values)
            labels.add(label)
            counts = f"{metrics.samples:,}", f"{metrics.positives:,}"
            rows.append([split, label, *counts, *values.values()])
    rows.insert(0, ["split", "label", "samples", "clicks", *titles])
    if len(labels) < 2:
        for row in rows:
            del row[1]  # the label
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _format_values(metrics: Metrics) -> dict[str, str]:
    """Return the metrics that the log shows, by title."""
    shown = {}
    for name, title in TITLES.items():
        if name in _PAGE_ONLY or (name == "gauc" and metrics.gauc_samples is None):
            continue
        value = getattr(metrics, name)
        shown[title] = "–" if value is None else f"{value:.5f}"
    return shown
