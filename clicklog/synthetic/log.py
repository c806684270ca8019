"""Write a synthetic click log, with the best AUROC that a model can reach on it.

The rows have Criteo's columns and come from a planted click model, :mod:`clicklog.synthetic.model`.
The model's own probabilities are the oracle: no predictor ranks new rows better, so compare the
AUROC of a trained model with the oracle's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import new_directory, write_json
from nvt_torchrec.clicklog.synthetic.model import (
    BLOCK_ROWS,
    CATEGORICAL,
    DENSE,
    MISSING_COUNT,
    SHARES,
    SIGNAL,
    ClickModel,
    Rows,
    SyntheticSettings,
    plant,
)
from nvt_torchrec.formats.splits import SPLITS, cut_last_day

#: Written last, beside the days.
SUMMARY_FILE = "synthetic.json"
SUMMARY_VERSION = 1

_BINS_PER_UNIT, _LARGEST_LOGIT = 2_048, 16
_DENSE_WORDS = 2  # tab, sign and two digits; four digits
_CATEGORICAL_WORDS = 3  # tab; four digits; four digits
_PADDED, _EMPTY = 10_000, 20_000  # where they begin in the decimal words


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
    workers: int = 1,
) -> dict[str, Any]:
    """Write ``day_0 … day_{days-1}`` and then ``synthetic.json`` into a directory.

    The bytes depend on the settings only, not on ``workers``. It takes about 100 MB of memory,
    and 15 MB for each further worker, whatever the number of rows.

    Args:
        output_path: A new or empty directory; it is there when everything is written.
        settings: The settings of the log.
        workers: The number of threads; each writes one day at a time.

    Returns:
        The content of ``synthetic.json``: settings, rows, positives, columns, the planted model,
        and the score of the oracle (:meth:`OracleScore.summary`) on each file and on each of
        train, valid and test (:func:`formats.splits.cut_last_day`).

    Raises:
        OutputError: The directory exists and is not empty, or cannot be written.
        SettingsError: ``workers`` is below 1.
    """
    from tqdm import tqdm

    if workers < 1:
        raise SettingsError(f"workers = {workers}", "give at least 1")
    directory = Path(output_path)
    model = plant(settings)
    with contextlib.suppress(OSError):
        directory.rmdir()  # an empty one
    with new_directory(directory) as temporary:
        total = settings.days * settings.rows_per_day
        stop = threading.Event()
        with (
            tqdm(total=total, unit="rows", unit_scale=True, desc="synthesize", disable=None) as bar,
            concurrent.futures.ThreadPoolExecutor(workers) as pool,
        ):
            days = [
                pool.submit(_write_day, temporary / f"day_{day}", model, day, bar, stop)
                for day in range(settings.days)
            ]
            try:
                scores = [day.result() for day in days]
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        summary = _summary(model, scores)
        write_json(temporary / SUMMARY_FILE, summary)
    return summary


def _write_day(
    path: Path, model: ClickModel, day: int, bar: Any, stop: threading.Event
) -> dict[str, OracleScore]:
    """Write one file, block by block; return the oracle's score in each split."""
    rows, days = model.settings.rows_per_day, model.settings.days
    ranges = {"train": (0, rows)}
    if day == days - 1:
        ranges = cut_last_day(rows, only_day=days == 1)
    scores = {split: OracleScore() for split in ranges}
    with open(path, "wb") as file:
        for begin in range(0, rows, BLOCK_ROWS):
            if stop.is_set():
                raise concurrent.futures.CancelledError
            block, logits = model.draw(day, begin // BLOCK_ROWS, min(BLOCK_ROWS, rows - begin))
            file.write(format_rows(block))
            for split, (first, end) in ranges.items():
                part = slice(max(first - begin, 0), max(end - begin, 0))
                scores[split].add(logits[part], block.label[part])
            with bar.get_lock():
                bar.update(len(block))
    return scores


def format_rows(rows: Rows) -> bytes:
    """Format rows in Criteo's format, one line each. Counts must lie in [-99_999, 999_999].

    Every field has whole 4-byte words, filled from tables for many rows at once; unused bytes are
    NUL and removed at the end. This is several times faster than formatting numbers one by one.
    """
    tables = _tables()
    words = np.empty((len(rows), len(tables.template)), np.uint32)
    words[:] = tables.template
    words[:, 0] = tables.decimal[rows.label]
    word = 1
    for counts in rows.dense:
        missing = counts == MISSING_COUNT
        negative = (counts < 0) & ~missing
        low = np.where(missing, 0, np.abs(counts))
        high = low // 10_000  # divmod is not vectorised in NumPy, this is
        low -= high * 10_000
        low += np.where(high > 0, _PADDED, 0)
        low[missing] = _EMPTY
        words[:, word] = tables.tab_sign_high[high + 100 * negative]
        words[:, word + 1] = tables.decimal[low]
        word += _DENSE_WORDS
    for values in rows.categorical:
        # For a missing value, whose code is 2**32, both halves are indices of the empty word.
        high = values >> 16
        low = (values & 0xFFFF) | (high & 0x10000)
        words[:, word + 1] = tables.hexadecimal[high]
        words[:, word + 2] = tables.hexadecimal[low]
        word += _CATEGORICAL_WORDS
    return words.tobytes().translate(None, b"\0")


class _Tables(NamedTuple):
    """Four characters each, as uint32 in the byte order of this machine.

    Attributes:
        decimal: 0 … 9999, then the same padded with zeros, then the empty word.
        hexadecimal: 0000 … ffff, then the empty word.
        tab_sign_high: the tab, sign and digits before the last four digits of a count, by its ten
            thousands; then the same for negative counts.
        template: a row with the words that all rows share: tabs and the newline.
    """

    decimal: np.ndarray
    hexadecimal: np.ndarray
    tab_sign_high: np.ndarray
    template: np.ndarray


@functools.cache
def _tables() -> _Tables:
    numbers = range(10_000)
    decimal = [str(i) for i in numbers] + [f"{i:04}" for i in numbers] + [""]
    hexadecimal = [f"{i:04x}" for i in range(65_536)] + [""]
    tens = [str(i) if i else "" for i in range(100)]
    tab_sign_high = [f"\t{i}" for i in tens] + [f"\t-{i}" for i in tens[:10]]
    template = ["", *["\t", ""] * DENSE, *["\t", "", ""] * CATEGORICAL, "\n"]
    return _Tables(
        *(
            np.frombuffer(b"".join(text.encode().rjust(4, b"\0") for text in table), np.uint32)
            for table in (decimal, hexadecimal, tab_sign_high, template)
        )
    )


def _summary(model: ClickModel, days: list[dict[str, OracleScore]]) -> dict[str, Any]:
    """Return the content of ``synthetic.json``."""
    oracle = {split: OracleScore() for split in SPLITS}
    files = []
    for day, scores in enumerate(days):
        whole = OracleScore()
        for split, score in scores.items():
            oracle[split].merge(score)
            whole.merge(score)
        files.append({"file": f"day_{day}", **whole.summary()})
    return {
        "version": SUMMARY_VERSION,
        "settings": dataclasses.asdict(model.settings),
        "rows": sum(file["rows"] for file in files),
        "positives": sum(file["positives"] for file in files),
        "files": files,
        "cardinalities": list(model.settings.cardinalities),
        "model": {
            "bias": _rounded(model.bias),
            "logit_std": SIGNAL,
            "variance_shares": SHARES,
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
