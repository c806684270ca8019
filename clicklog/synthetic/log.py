"""Write a synthetic click log, with the best AUROC that a model can reach on it.

The rows come from a planted click model: :mod:`clicklog.synthetic.model` for Criteo's columns,
:mod:`clicklog.synthetic.any_spec` for those of any other feature spec. The model's own
probabilities are the oracle: no predictor ranks new rows better, so compare the AUROC of a trained
model with the oracle's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from clicklog.errors import OutputError, SettingsError
from clicklog.files.atomic import TEMPORARY, atomic_path, locked, output_errors, write_json
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.spec.split import BY_DAYS
from clicklog.spec.times import parse_iso
from clicklog.spec.toml_file import load_spec
from clicklog.splits import SPLITS, cut_last_day
from clicklog.synthetic.model import (
    BLOCK_ROWS,
    SHARES,
    SIGNAL,
    SyntheticSettings,
    plant,
)
from clicklog.synthetic.sources import day_begin
from clicklog.synthetic.tsv import format_rows

#: Written last, beside the days.
SUMMARY_FILE = "synthetic.json"
SUMMARY_VERSION = 1

_MARKER = f".synthesize{TEMPORARY}"
_BINS_PER_UNIT, _LARGEST_LOGIT = 2_048, 16


@dataclasses.dataclass
class OracleScore:
    """Metrics of the true click probabilities on the labels drawn from them; rows can be added.

    The AUROC comes from a histogram of the log odds with bins of 1/2048, where a pair in one bin
    counts as a tie. It takes bounded memory, does not depend on the order of the rows, and is
    within 1e-5 of the exact value on splits of a few thousand rows or more.
    """

    counts: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((2, 2 * _LARGEST_LOGIT * _BINS_PER_UNIT), np.int64)
    )
    loss_sum: float = 0.0

    def add(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """Add rows: their true log odds (float64 [n]) and labels (0 or 1)."""
        bins = self.counts.shape[1]
        index = ((logits + _LARGEST_LOGIT) * _BINS_PER_UNIT).astype(np.int64).clip(0, bins - 1)
        index += labels * bins
        self.counts += np.bincount(index, minlength=2 * bins).reshape(2, bins)
        self.loss_sum += float((np.logaddexp(0, logits) - labels * logits).sum())

    def merge(self, other: OracleScore) -> None:
        """Add the rows of another score."""
        self.counts += other.counts
        self.loss_sum += other.loss_sum

    def summary(self) -> dict[str, Any]:
        """Return rows, positives, auroc, log_loss and normalized_entropy.

        The last three are None if one class is missing. The log loss is in nats. The normalized
        entropy is the log loss divided by that of always predicting the share of positives (He et
        al., Practical Lessons from Predicting Clicks on Ads at Facebook, 2014).
        """
        negatives, positives = (int(n) for n in self.counts.sum(axis=1))
        rows = negatives + positives
        summary = {"rows": rows, "positives": positives}
        if not (negatives and positives):
            return summary | {"auroc": None, "log_loss": None, "normalized_entropy": None}
        below = np.cumsum(self.counts[0]) - self.counts[0]  # negatives in lower bins
        wins = float((self.counts[1] * (below + self.counts[0] / 2)).sum())
        rate = positives / rows
        entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
        log_loss = self.loss_sum / rows
        return summary | {
            "auroc": _rounded(wins / (negatives * positives)),
            "log_loss": _rounded(log_loss),
            "normalized_entropy": _rounded(log_loss / entropy),
        }


def synthesize(
    output_path: Path | str,
    settings: SyntheticSettings,
    *,
    spec: FeatureSpec | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    """Write ``day_0 … day_{days-1}`` and then ``synthetic.json`` into a directory.

    The bytes depend on settings and spec only, not on ``workers``. It takes about 100 MB of memory,
    and 15 MB for each further worker, whatever the number of rows.

    Args:
        output_path: a new or empty directory, or that of an interrupted call.
        settings: the settings of the log.
        spec: the columns and the file format (``day_0.csv``, ``day_0.parquet``); Criteo's if None.
            A vocabulary with a bound gets more values than the bound.
        workers: number of threads; each writes one day at a time.

    Returns:
        The content of ``synthetic.json``: settings, rows, positives, columns, the planted model,
        and the score of the oracle (:meth:`OracleScore.summary`) on each file and on each of
        train, valid and test (:func:`clicklog.splits.cut_last_day`, or as the spec splits rows; of
        splits by a hash or by shares of the time, each has the score of all rows).

    Raises:
        OutputError: the directory contains other files, or cannot be written.
        SettingsError: ``workers`` is below 1.
    """
    from tqdm import tqdm

    if workers < 1:
        raise SettingsError(f"workers = {workers}", "give at least 1")
    directory = Path(output_path)
    log = _log_of(spec, settings)
    with _claimed(directory, log.names):
        total = settings.days * settings.rows_per_day
        stop = threading.Event()
        with (
            tqdm(total=total, unit="rows", unit_scale=True, desc="synthesize", disable=None) as bar,
            concurrent.futures.ThreadPoolExecutor(workers) as pool,
        ):
            days = [
                pool.submit(_write_day, directory / log.file(day), log, day, bar, stop)
                for day in range(settings.days)
            ]
            try:
                scores = [day.result() for day in days]
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        summary = _summary(log, scores)
        write_json(directory / SUMMARY_FILE, summary)
    return summary


@dataclasses.dataclass(frozen=True)
class _Log:
    """A planted model (``ClickModel`` or ``SpecModel``) and how its rows are written.

    Attributes:
        model: draws rows.
        ending: suffix of the files' names.
        open: opens a file; yields a function that appends rows to it.
        shares: share of each kind of signal in the variance of the logit.
        cardinalities: number of values of each categorical column.
        names: names of the files; () for ``day_N``.
        spec: the spec, if it is not Criteo's.
    """

    model: Any
    ending: str
    open: Callable[[Path], contextlib.AbstractContextManager[Callable[[Any], object]]]
    shares: dict[str, float]
    cardinalities: list[int]
    names: tuple[str, ...] = ()
    spec: FeatureSpec | None = None

    def ranges(self, day: int, rows: int) -> dict[str, tuple[int, int]]:
        """Return which rows of a day are in which split, as far as that follows from the day."""
        split = self.spec.split if self.spec else BY_DAYS
        days = self.model.settings.days
        if split.by == "days":
            last, only = day == days - 1, days == 1
            return cut_last_day(rows, only_day=only) if last else {"train": (0, rows)}
        name = "train"
        if split.by == "files":
            tested = len(split.test_files)
            valid = len(split.valid_files)
            name = "test" if day >= days - tested else name
            name = "valid" if days - tested - valid <= day < days - tested else name
        elif self.spec is not None and split.test_from:
            begin = day_begin(self.spec, days, day)
            name = "valid" if begin >= parse_iso(split.valid_from, "valid_from") else name
            name = "test" if begin >= parse_iso(split.test_from, "test_from") else name
        return {name: (0, rows)}

    @property
    def random_split(self) -> bool:
        """Whether the splits are parts of all days: each has about the score of all rows."""
        split = self.spec.split if self.spec else BY_DAYS
        return split.by in ("share", "column") or bool(split.by == "time" and not split.test_from)

    def file(self, day: int) -> str:
        if self.names:
            return self.names[day]
        return f"day_{day}{self.ending}"


def _log_of(spec: FeatureSpec | None, settings: SyntheticSettings) -> _Log:
    if spec is None or _file_columns(spec) == _file_columns(load_spec()):
        model = plant(settings)
        return _Log(model, "", _open_tsv, SHARES, list(settings.cardinalities))
    from clicklog.synthetic.any_spec import plant_spec
    from clicklog.synthetic.write import open_writer

    general = plant_spec(spec, settings)
    ending = "" if spec.input.format == "tsv" else f".{spec.input.format}"
    opener = functools.partial(open_writer, spec=spec, days=settings.days)
    names = _file_names(spec, settings.days)
    return _Log(general, ending, opener, general.shares, general.cardinalities, names, spec)


def _file_names(spec: FeatureSpec, days: int) -> tuple[str, ...]:
    """Return the names of the files, if rows are split by them; else ()."""
    split = spec.split
    if split.by != "files":
        return ()
    evaluated = [name.replace("*", "0") for name in (*split.valid_files, *split.test_files)]
    names = list(split.train_files)
    if "*" in names[0]:
        names = [names[0].replace("*", str(day)) for day in range(days - len(evaluated))]
    names += evaluated
    if len(names) != days or len(set(names)) != days:
        raise SettingsError(
            f"split by files names {len(set(names))} files, for {days} days",
            f'give --days {len(set(names))}, or a pattern such as train = "part-*.csv"',
        )
    return tuple(names)


def _file_columns(spec: FeatureSpec) -> tuple[bool, list[str], list[str]]:
    """Return what determines a file's columns: not the policies and not the label's name."""
    return spec.is_criteo_format, spec.dense_names, spec.categorical_names


@contextlib.contextmanager
def _open_tsv(path: Path) -> Iterator[Callable[[Any], object]]:
    with open(path, "wb") as file:
        yield lambda rows: file.write(format_rows(rows))


def _write_day(
    path: Path, log: _Log, day: int, bar: Any, stop: threading.Event
) -> dict[str, OracleScore]:
    """Write one file, block by block; return the oracle's score in each split."""
    model = log.model
    rows = model.settings.rows_per_day
    ranges = log.ranges(day, rows)
    scores = {split: OracleScore() for split in ranges}
    with atomic_path(path) as temporary, log.open(temporary) as write:
        for begin in range(0, rows, BLOCK_ROWS):
            if stop.is_set():
                raise concurrent.futures.CancelledError
            block, logits = model.draw(day, begin // BLOCK_ROWS, min(BLOCK_ROWS, rows - begin))
            write(block)
            for split, (first, end) in ranges.items():
                part = slice(max(first - begin, 0), max(end - begin, 0))
                scores[split].add(logits[part], block.label[part])
            with bar.get_lock():
                bar.update(len(block))
    return scores


def _summary(log: _Log, days: list[dict[str, OracleScore]]) -> dict[str, Any]:
    """Return the content of ``synthetic.json``."""
    model = log.model
    oracle = {split: OracleScore() for split in SPLITS}
    files = []
    for day, scores in enumerate(days):
        whole = OracleScore()
        for split, score in scores.items():
            oracle[split].merge(score)
            whole.merge(score)
        files.append({"file": log.file(day), **whole.summary()})
    if log.random_split:
        oracle = dict.fromkeys(SPLITS, oracle["train"])
    return {
        "version": SUMMARY_VERSION,
        "settings": dataclasses.asdict(model.settings),
        "rows": sum(file["rows"] for file in files),
        "positives": sum(file["positives"] for file in files),
        "files": files,
        "cardinalities": log.cardinalities,
        "model": {
            "bias": _rounded(model.bias),
            "logit_std": SIGNAL,
            "variance_shares": log.shares,
            "terms": [
                {
                    "kind": term.kind,
                    "columns": list(term.columns),
                    "weight": _rounded(term.weight),
                    "centres": [_rounded(centre) for centre in term.centres],
                    "scales": [_rounded(scale) for scale in term.scales],
                }
                for term in model.terms
            ],
        },
        "oracle": {split: score.summary() for split, score in oracle.items()},
    }


def _rounded(value: float) -> float:
    """Round to nine significant digits, which are the same on every machine."""
    return float(f"{value:.9g}")


@contextlib.contextmanager
def _claimed(directory: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Reserve a directory for writing; delete the files of an interrupted run.

    A marker file is there while a log is being written. Days beside it belong to an unfinished log;
    days without it may be real data and are not touched. A lock on the marker excludes other
    processes.
    """
    marker = directory / _MARKER
    with contextlib.ExitStack() as stack:
        with output_errors(directory, "choose another directory"):
            directory.mkdir(parents=True, exist_ok=True)
            fresh = not marker.exists()
            stack.enter_context(locked(marker, directory))
        try:
            _clear(directory, names, days_are_ours=not fresh)
        except OutputError:
            if fresh:
                marker.unlink()
            raise
        yield
        marker.unlink()


def _clear(directory: Path, names: tuple[str, ...], *, days_are_ours: bool) -> None:
    """Delete unfinished files; raise an error before deleting any if there are other files."""
    ours: list[os.DirEntry[str]] = []
    others: list[os.DirEntry[str]] = []
    for entry in os.scandir(directory):
        is_day = re.fullmatch(r"day_\d+(\.csv|\.parquet)?", entry.name) is not None
        is_day |= entry.name in names
        mine = entry.name.endswith(TEMPORARY) or (is_day and days_are_ours)
        (ours if mine and entry.is_file(follow_symlinks=False) else others).append(entry)
    if others:
        raise OutputError(
            f"{directory}: holds {len(others)} files already, {min(e.name for e in others)} first",
            "choose an empty or new directory; nothing was changed",
        )
    for entry in ours:
        if entry.name != _MARKER:
            os.unlink(entry.path)
