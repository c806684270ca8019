"""Latency and throughput of scoring by batch size, compared with NVTabular and TorchRec.

Both systems score the same rows in one process. They take turns batch by batch, so that other load
on the machine affects both.

- *ours*: rows as dicts (as in JSON) → ``Predictor.predict``; and its stages: read (dicts → typed
  columns), encode (→ ids and dense features), lookup (→ embeddings), dense (the rest of the model).
- *stock*: the same rows as a pandas frame, made beforehand → NVTabular's ``Workflow.transform`` → a
  KeyedJaggedTensor → TorchRec's DLRM with the same weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.clicklog.in_memory.values import read_as_text
from nvt_torchrec.clicklog.readers.stream import UnparsedRows, stream_unparsed
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.reading import Read
from nvt_torchrec.inference.inputs.ids import IdColumns, names_of_file
from nvt_torchrec.inference.predictor import Predictor

_PIECE_BYTES = 2 << 20
_MAX_ROWS = 1 << 17
_NUMBERS: dict[str, Callable[[str], Any]] = {"int32": int, "int": int, "float": float}


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of one stage at one batch size.

    Attributes:
        batch: Rows in a batch.
        stage: Name of the stage.
        p50: Median time of a batch in milliseconds; p90 and p99 likewise.
        rows_per_s: Rows in a batch divided by the median time.
        batches: Number of batches timed.
    """

    batch: int
    stage: str
    p50: float
    p90: float
    p99: float
    rows_per_s: float
    batches: int


def first_pieces(path: str, spec: FeatureSpec, rows: int) -> list[UnparsedRows]:
    """Return the first pieces of a file, with at least ``rows`` rows if it has them."""
    pieces, count = [], 0
    for piece in stream_unparsed(path, spec, block_bytes=_PIECE_BYTES):
        pieces.append(piece)
        count += len(piece.parse(reject=True))
        if count >= rows:
            break
    if not count:
        raise SettingsError(f"{path}: no well-formed row", "pass a file with valid rows")
    return pieces


def measure(
    predictor: Predictor, stock: Any, pieces: list[UnparsedRows], size: int, seconds: float
) -> list[Timing]:
    """Time all stages on batches of ``size`` rows.

    Args:
        predictor: The predictor to measure.
        stock: The baseline, an :class:`inference.stock.Stock`; None to measure without it.
        pieces: The rows, which are repeated if they are too few.
        size: Rows in a batch.
        seconds: Time for the predictor, and for the baseline, which scores one batch at least.
    """
    taken: dict[str, list[float]] = {}
    batches = _batches(predictor, pieces, size)

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        taken.setdefault(stage, []).append(time.perf_counter() - begin)
        return result

    def ours(rows: list[dict]) -> np.ndarray:
        score = timed("ours: rows to probability", lambda: predictor.predict(rows))
        raw = timed("  read", lambda: predictor.read(rows))
        encoded = timed("  encode", lambda: predictor.workflow.transform(raw))
        with torch.inference_mode():
            embedded = timed("  lookup", lambda: _done(predictor.model.lookup(encoded.ids)))
            timed("  dense", lambda: _done(predictor.model.logits(encoded.dense, embedded)))
        return score

    for rows, _ in itertools.islice(batches, 5):  # caches, compiled code
        ours(rows)
    taken.clear()
    if stock is not None:
        stock.predict(stock.frame(next(batches)[1]), timed)
        taken.clear()
    spent = {"ours": 0.0, "stock": 0.0}
    while min(spent.values()) < seconds:
        rows, raw = next(batches)
        begin = time.perf_counter()
        score = ours(rows)
        spent["ours"] += time.perf_counter() - begin
        if stock is None:
            spent["stock"] = spent["ours"]
        elif spent["stock"] <= min(spent["ours"], seconds):
            frame = stock.frame(raw)
            begin = time.perf_counter()
            expected = timed("stock: frame to probability", partial(stock.predict, frame, timed))
            spent["stock"] += time.perf_counter() - begin
            exact = predictor.model.table.kind == "float32"
            np.testing.assert_allclose(score, expected, atol=1e-5 if exact else 0.1)
    return [_timing(size, stage, values) for stage, values in taken.items()]


def _done(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return tensor


def _timing(size: int, stage: str, seconds: list[float]) -> Timing:
    p50, p90, p99 = (1e3 * float(np.quantile(seconds, q)) for q in (0.5, 0.9, 0.99))
    return Timing(size, stage, p50, p90, p99, size / (p50 / 1e3), len(seconds))


def _batches(
    predictor: Predictor, pieces: list[UnparsedRows], size: int
) -> Iterator[tuple[list[dict], RawRows]]:
    """Yield batches of ``size`` rows without end, as dicts and as typed columns."""
    dicts = []
    for piece in pieces:
        dicts += rows_as_dicts(piece, _MAX_ROWS - len(dicts))
    dicts *= -(-size // len(dicts))
    for at in itertools.cycle(range(0, len(dicts) - size + 1, size)):
        rows = dicts[at : at + size]
        yield rows, predictor.read(rows)


def rows_as_dicts(piece: UnparsedRows, limit: int) -> list[dict[str, Any]]:
    """Return the well-formed rows of a piece, at most ``limit``, by source; None where missing.

    Of text, numbers become numbers, unless the spec has rules for how they are written.
    """
    spec = piece.spec
    lines = piece.parse(reject=True).line[:limit]
    reads = spec.read_plan(label=False).reads
    text = read_as_text(reads)
    names = tuple(spec.sources(label=False))
    fields = IdColumns(names, names_of_file(piece.path, spec, piece)).read(piece, lines)
    columns = []
    for name in names:
        read = next(read for read in reads if read.source == name)
        values = fields[name].to_pylist()
        if piece.block is None:
            number = None if name in text else _NUMBERS.get(read.raw)
            values = [_value(value, read, number, spec.input.list_separator) for value in values]
        columns.append(values)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _value(text: str, read: Read, number: Callable | None, separator: str) -> Any:
    if read.multi_hot:
        items = text.split(separator) if text else []
        return [number(item) for item in items] if number else items
    if not text:
        return None
    return number(text) if number else text


def print_table(timings: list[Timing]) -> None:
    """Print a line for each stage, and by how much faster than the baseline it is."""
    print(f"{'batch':>6}  {'':28}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}{'rows/s':>12}")
    for timing in timings:
        print(
            f"{timing.batch:>6}  {timing.stage:28}{timing.p50:10.3f}{timing.p90:10.3f}"
            f"{timing.p99:10.3f}{timing.rows_per_s:12,.0f}"
        )
    for size in dict.fromkeys(timing.batch for timing in timings):
        by_stage = {timing.stage: timing for timing in timings if timing.batch == size}
        stock = by_stage.get("stock: frame to probability")
        if stock is None:
            continue
        ours = by_stage["ours: rows to probability"].p50
        transform = by_stage["  Workflow.transform"].p50
        encode = by_stage["  read"].p50 + by_stage["  encode"].p50
        print(
            f"batch {size}: {stock.p50 / ours:,.0f} times faster than stock; read and encode "
            f"{transform / encode:,.0f} times faster than Workflow.transform"
        )
