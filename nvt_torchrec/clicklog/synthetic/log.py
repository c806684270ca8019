"""Write a synthetic click log, and the best AUROC that a model can reach on it.

The rows have Criteo's columns and come from a planted click model
(:mod:`clicklog.synthetic.click_model`), or are events (:mod:`clicklog.synthetic.event_log`), or
have tables (:mod:`clicklog.synthetic.table_log`). The true click probabilities are the oracle: no
predictor ranks new rows better, so compare the AUROC of a trained model with the oracle's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import mask_to_arrow, to_arrow
from nvt_torchrec.base.files.atomic import new_directory, write_json, write_text
from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.synthetic.click_model import (
    BLOCK_ROWS,
    MISSING_COUNT,
    MISSING_VALUE,
    SyntheticModel,
    SyntheticRows,
    SyntheticSettings,
    plant,
)
from nvt_torchrec.clicklog.synthetic.event_log import (
    BEGIN,
    COLUMNS,
    DAY,
    EVENTS,
    LABEL,
    SPEC_HEAD,
    draw_events,
    format_seconds,
)
from nvt_torchrec.clicklog.synthetic.late_clicks import FILE_LABEL, take_clicks
from nvt_torchrec.clicklog.synthetic.table_log import (
    TABLES_AND_COLUMNS,
    VECTORS,
    draw_tables,
)
from nvt_torchrec.formats.splits import SPLITS, cut_last_day

#: Written last, next to the days.
SUMMARY_FILE = "synthetic.json"
SUMMARY_VERSION = 3

#: The bins of the oracle's histogram: the number of bins per unit of the log odds, and the limit of
#: the log odds, beyond which all rows are in the outermost bins.
_BINS_PER_UNIT = 2_048
_MAX_LOGIT = 16


@dataclasses.dataclass
class OracleScore:
    """The AUROC of the true click probabilities on the labels drawn from them; rows can be added.

    It is computed from a histogram of the log odds with bins of 1/2048; pairs in the same bin count
    as ties. It takes bounded memory, does not depend on the order of the rows, and is within 1e-5
    of the exact value on splits of a few thousand rows or more.
    """

    counts: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((2, 2 * _MAX_LOGIT * _BINS_PER_UNIT), np.int64)
    )

    def add(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """Add rows: their true log odds (float64 [n]) and labels (0 or 1)."""
        bins = self.counts.shape[1]
        index = ((logits + _MAX_LOGIT) * _BINS_PER_UNIT).astype(np.int64).clip(0, bins - 1)
        index += labels * bins
        self.counts += np.bincount(index, minlength=2 * bins).reshape(2, bins)

    def merge(self, other: OracleScore) -> None:
        """Add the rows of another score."""
        self.counts += other.counts

    def summary(self) -> dict[str, Any]:
        """Return rows, positives and auroc (nine digits; None if one class is missing)."""
        negatives, positives = (int(n) for n in self.counts.sum(axis=1))
        below = np.cumsum(self.counts[0]) - self.counts[0]  # negatives in lower bins
        wins = float((self.counts[1] * (below + self.counts[0] / 2)).sum())
        pairs = negatives * positives
        auroc = float(f"{wins / pairs:.9g}") if pairs else None
        return {"rows": negatives + positives, "positives": positives, "auroc": auroc}


def synthesize(
    output_path: Path | str, settings: SyntheticSettings, *, workers: int = 1
) -> dict[str, Any]:
    """Write ``day_0 … day_{days-1}`` and then ``synthetic.json`` into a directory.

    With events or tables, the files are ``day_0.csv`` … next to ``spec.toml``, and all rows are
    held in memory. Otherwise it takes about 100 MB of memory, and 15 MB for each additional worker,
    whatever the number of rows. The bytes depend on the settings only, not on ``workers``.

    Args:
        output_path: A new or empty directory, which is written atomically.
        settings: The settings of the log.
        workers: The number of threads; each writes one day at a time.

    Returns:
        The content of ``synthetic.json``: settings, rows, positives, and the score of the oracle
        (:meth:`OracleScore.summary`) on each of train, valid and test
        (:func:`formats.splits.cut_last_day`).

    Raises:
        OutputError: The directory exists and is not empty, or cannot be written.
    """
    directory = Path(output_path)
    with contextlib.suppress(OSError):
        directory.rmdir()  # only if it is empty
    with new_directory(directory) as temporary:
        total = settings.days * settings.rows_per_day
        with show_progress("synthesize", total) as bar:
            if settings.events or settings.tables:
                scores = _write_drawn(temporary, settings, bar)
            else:
                model = plant(settings)

                def write(day: int) -> dict[str, OracleScore]:
                    return _write_day(temporary / f"day_{day}", model, day, bar)

                scores = list(map_in_order(write, range(settings.days), workers, "synthesize"))
        summary = _summary(settings, scores)
        write_json(temporary / SUMMARY_FILE, summary)
    return summary


def _write_day(path: Path, model: SyntheticModel, day: int, bar: Any) -> dict[str, OracleScore]:
    """Write the file of one day, block by block; return the oracle's score in each split."""
    rows = model.settings.rows_per_day
    days = model.settings.days
    ranges = {"train": (0, rows)}
    if day == days - 1:
        ranges = cut_last_day(rows, only_day=days == 1)
    scores = {split: OracleScore() for split in ranges}
    with open(path, "wb") as file:
        for begin in range(0, rows, BLOCK_ROWS):
            block, logits = model.draw(day, begin // BLOCK_ROWS, min(BLOCK_ROWS, rows - begin))
            file.write(format_rows(block))
            for split, (first, end) in ranges.items():
                part = slice(max(first - begin, 0), max(end - begin, 0))
                scores[split].add(logits[part], block.label[part])
            with bar.get_lock():
                bar.update(len(block))
    return scores


def _write_drawn(
    directory: Path, settings: SyntheticSettings, bar: Any
) -> list[dict[str, OracleScore]]:
    """Write a log of events or with tables, and its spec.

    Returns:
        The oracle's score in each split, for each day.
    """
    rows = settings.days * settings.rows_per_day
    if settings.tables:
        columns = TABLES_AND_COLUMNS + (VECTORS if settings.vectors else "")
        logits, seconds, log, tables = draw_tables(
            rows, settings.days, settings.seed, bar.update, vectors=settings.vectors
        )
        for name, table in tables.items():
            if any(map(pa.types.is_list, table.schema.types)):  # CSV cannot hold lists
                pq.write_table(table, directory / f"{name}.parquet")
            else:
                pa_csv.write_csv(table, directory / f"{name}.csv")
    else:
        columns = COLUMNS + EVENTS
        logits, seconds, log = draw_events(rows, settings.days, settings.seed, advance=bar.update)
    # valid and test are the halves of the last day or, if there is only one, of its last fifth, as
    # in the log of Criteo's columns
    end = settings.days * DAY
    held_out = DAY if settings.days > 1 else DAY // 5
    begins = [0, end - held_out, end - held_out // 2]
    valid, test = format_seconds(BEGIN + np.array(begins[1:])).to_pylist()
    head = SPEC_HEAD.format(valid=valid, test=test)
    split = np.searchsorted(begins, seconds, side="right") - 1
    labels = log["click"].to_numpy()
    scores = []
    if settings.late_clicks:
        head = head.replace(LABEL, FILE_LABEL)
        log = _write_clicks(directory, settings, log, seconds)
    write_text(directory / "spec.toml", head + columns)
    for day in range(settings.days):
        first, last = np.searchsorted(seconds, [day * DAY, (day + 1) * DAY])
        pa_csv.write_csv(log.slice(first, last - first), directory / f"day_{day}.csv")
        day_rows = slice(first, last)
        day_scores = {}
        for number in np.unique(split[day_rows]).tolist():
            chosen = split[day_rows] == number
            score = OracleScore()
            score.add(logits[day_rows][chosen], labels[day_rows][chosen])
            day_scores[SPLITS[number]] = score
        scores.append(day_scores)
    return scores


def _write_clicks(
    directory: Path, settings: SyntheticSettings, table: pa.Table, seconds: np.ndarray
) -> pa.Table:
    """Write the clicks of each day; return the log without them."""
    log, clicks, arrived = take_clicks(table, seconds, settings.seed)
    for day in range(settings.days):
        begin, until = np.searchsorted(arrived, [day * DAY, (day + 1) * DAY])
        pa_csv.write_csv(clicks.slice(begin, until - begin), directory / f"clicks_{day}.csv")
    return log


def format_rows(rows: SyntheticRows) -> bytes:
    """Format rows in Criteo's format, one line each."""
    columns: list[pa.Array] = [to_arrow(rows.label)]
    for counts in rows.dense:
        present = mask_to_arrow(counts != MISSING_COUNT).buffers()[1]
        columns.append(
            pa.Array.from_buffers(pa.int64(), len(rows), [present, pa.py_buffer(counts)])
        )
    # The string arrays are made from buffers: all values have eight hexadecimal digits.
    offsets = pa.py_buffer(np.arange(0, 8 * len(rows) + 1, 8, dtype=np.int32))
    for values in rows.categorical:
        present = mask_to_arrow(values != MISSING_VALUE).buffers()[1]
        digits = pa.py_buffer(values.astype(">u4").tobytes().hex().encode())
        columns.append(pa.StringArray.from_buffers(len(rows), offsets, digits, present))
    text = io.BytesIO()
    options = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    pa_csv.write_csv(pa.table(columns, list(map(str, range(len(columns))))), text, options)
    return text.getvalue()


def _summary(settings: SyntheticSettings, days: list[dict[str, OracleScore]]) -> dict[str, Any]:
    """Return the content of ``synthetic.json``."""
    scores = {split: OracleScore() for split in SPLITS}
    for day_scores in days:
        for split, score in day_scores.items():
            scores[split].merge(score)
    oracle = {split: score.summary() for split, score in scores.items()}
    return {
        "version": SUMMARY_VERSION,
        "settings": dataclasses.asdict(settings),
        "rows": sum(score["rows"] for score in oracle.values()),
        "positives": sum(score["positives"] for score in oracle.values()),
        "oracle": oracle,
    }
