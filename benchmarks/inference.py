"""Compare latency and throughput of scoring with NVTabular and TorchRec.

All systems score the same rows in one process. They take turns batch by batch, so that other load
on the machine affects all of them. The latency of a single row is also measured on busy cores.

- *ours*: rows as dicts (as in JSON) → ``Predictor.predict``; and two steps of it: read (dicts →
  typed columns) and encode (→ ids and dense features).
- *onnx*: the same rows as tensors, made beforehand → ``model.onnx`` by ONNX Runtime. For a model
  with events, all rows then contain their aggregates and histories, because an exported model has
  no events.
- *stock*: the same rows as a pandas frame, made beforehand → NVTabular's ``Workflow.transform`` → a
  KeyedJaggedTensor → TorchRec's DLRM with the same weights.

With ``--onnx``, ``--bundle`` and ``--requests``, requests of one row over HTTP are also compared
with FastAPI and ONNX Runtime (:mod:`.serving`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.serving import add_events, print_requests
from nvt_torchrec.base.command_line import Parser, Settings, flag, parse
from nvt_torchrec.base.errors import SettingsError, run_command
from nvt_torchrec.base.threads import count_cores
from nvt_torchrec.clicklog.in_memory.python_values import list_text_sources
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows, get_format
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.inference import named_tensors as tensors
from nvt_torchrec.inference.commands.model import ModelSettings
from nvt_torchrec.inference.model.torch_threads import limit_threads
from nvt_torchrec.inference.predictor import Predictor, make_input_spec, name_by_label
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.workflow_frames import to_frame

if TYPE_CHECKING:
    import pandas as pd
    from onnxruntime import InferenceSession
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_PIECE_BYTES = 2 << 20
#: The number of distinct rows in requests.
_REQUEST_ROWS = 256
#: The minimum number of rows to read from the input.
_MIN_READ_ROWS = 1 << 14
# The measured stages.
_OURS = "ours: rows to probability"
_READ = "  read"
_ENCODE = "  encode"
_ONNX = "onnx: tensors to probability"
_STOCK = "stock: frame to probability"
_TRANSFORM = "  Workflow.transform"
_PLAIN_MODEL = "  plain model"
#: Raw type → function that converts a string to a number.
_NUMBERS: dict[str, Callable[[str], Any]] = {"int32": int, "int": int, "float": float}


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """The settings of the benchmark."""

    input: str = flag("raw rows to score", metavar="FILE")
    batch_sizes: tuple[int, ...] = flag("batch sizes", (1, 64, 4096), minimum=1)
    seconds: float = flag("seconds for each measurement", 2.0)
    onnx: Path | None = flag("also measure this export of the same model", None, metavar="FILE")
    requests: bool = flag(
        "with --bundle and --onnx: also compare requests to the server with FastAPI and ONNX "
        "Runtime, which are installed into build/ first",
        False,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    return run_command(lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    parser = Parser(prog="python -m benchmarks.inference", description=__doc__)
    model, settings = parse(parser, argv, ModelSettings, BenchmarkSettings)
    predictor = model.load()
    spec = make_input_spec(predictor.spec, settings.input)
    rows = read_first_rows(settings.input, spec, max(*settings.batch_sizes, _MIN_READ_ROWS))
    stock = None
    if model.workflow and model.checkpoint:
        stock = Stock(model.workflow, model.checkpoint, predictor.model.device)
    if settings.onnx:
        rows = [add_events(predictor, row) for row in rows]
    times = {}
    for size in settings.batch_sizes:
        times[size] = measure(predictor, stock, rows, size, settings.seconds, settings.onnx)
    print_table(times)
    print_one_row(predictor, rows[0], settings.seconds)
    if model.bundle and settings.onnx and settings.requests:
        print_requests(predictor, model.bundle, settings.onnx, rows[:_REQUEST_ROWS])


def read_first_rows(path: str, spec: FeatureSpec, limit: int) -> list[dict[str, Any]]:
    """Read the first ``limit`` well-formed rows of a file as dicts."""
    rows: list[dict[str, Any]] = []
    for piece in get_format(spec).stream(path, _PIECE_BYTES):
        rows += convert_to_dicts(piece, limit - len(rows))
        if len(rows) == limit:
            break
    if not rows:
        raise SettingsError(f"{path} has no well-formed row", "pass a file with valid rows")
    return rows


def convert_to_dicts(piece: UnparsedRows, limit: int) -> list[dict[str, Any]]:
    """Convert at most ``limit`` well-formed rows of a piece to dicts; missing values are None.

    In text formats, numbers are parsed, unless the spec has rules for how they are written.
    """
    spec = piece.spec
    lines = piece.parse(reject=True).line[:limit]
    reads = spec.read_plan(label=False).reads
    text_columns = list_text_sources(reads)
    names = tuple(spec.sources(label=False))
    fields = piece.columns(names, lines)
    columns = []
    for name in names:
        read = next(read for read in reads if read.source == name)
        values = fields[name].to_pylist()
        if spec.input.delimiter:  # a text format
            parse_number = None if name in text_columns else _NUMBERS.get(read.raw)
            separator = spec.input.list_separator
            values = [_parse_field(value, read, parse_number, separator) for value in values]
        columns.append(values)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _parse_field(text: str, read: Read, parse_number: Callable | None, separator: str) -> Any:
    """Convert a field of text to the value that a request would contain."""
    if read.multi_hot:
        items = [item for item in text.split(separator) if item]
        return [parse_number(item) for item in items] if parse_number else items
    if not text:
        return None
    return parse_number(text) if parse_number else text


#: A function that runs a stage and records its time: (name of the stage, function) → result.
RunTimed = Callable[[str, Callable[[], Any]], Any]


class Stock:
    """The baseline: NVTabular's Workflow, and TorchRec's model with the same weights."""

    def __init__(self, workflow: Path, checkpoint: Path, device: torch.device) -> None:
        import nvt_torchrec.nvt_compat  # noqa: F401

        from nvt_torchrec.models.checkpoint.reading import read_model
        from nvt_torchrec.training.sharding.train_model import build_model
        from nvt_torchrec.workflows.store import load

        description = inspect(workflow)
        self._spec = description.spec
        self._schema = description.table_schema
        self._workflow = load(workflow, label=False, raw=False)
        rows, head, config = read_model(checkpoint, device)
        self._model = build_model(config, device="meta")
        self._device = device
        self._model.head = head
        bags = self._model.sparse_arch.embedding_bag_collection.embedding_bags
        for name, part in zip(config.tables, rows.split([*config.tables.values()]), strict=True):
            bags[name].weight = torch.nn.Parameter(part)

    def make_frame(self, rows: RawRows) -> pd.DataFrame:
        """Make the frame that the Workflow transforms, without labels."""
        return to_frame(rows, self._spec)

    def predict(self, frame: pd.DataFrame, run_timed: RunTimed) -> np.ndarray:
        """Return probabilities, [rows]."""
        features = run_timed(_TRANSFORM, lambda: self._workflow.transform(frame))
        return run_timed(_PLAIN_MODEL, lambda: self._score(features))

    @torch.inference_mode()
    def _score(self, features: pd.DataFrame) -> np.ndarray:
        dense, sparse = to_tensors(features, self._schema)
        logits = self._model(dense.to(self._device), sparse.to(self._device))
        return torch.sigmoid(logits).squeeze(-1).cpu().numpy()


def to_tensors(features: pd.DataFrame, schema: Any) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """Convert a Workflow's output to the model's inputs: dense float32 [rows, columns], and ids."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    values = []
    lengths = []
    for name in schema.categorical:
        column = features[name]
        if name in schema.multi_hot:
            lengths.append(np.array([len(ids) for ids in column], np.int32))
            values += [np.asarray(ids, np.int64) for ids in column]
        else:
            lengths.append(np.ones(len(column), np.int32))
            values.append(column.to_numpy(np.int64))
    sparse = KeyedJaggedTensor(
        keys=list(schema.categorical),
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
    )
    dense = features[list(schema.dense)].to_numpy(np.float32)
    # np.array copies: pandas' array may be read-only, about which PyTorch warns.
    return torch.from_numpy(np.array(dense)), sparse


def measure(
    predictor: Predictor,
    stock: Stock | None,
    rows: list[dict],
    size: int,
    seconds: float,
    file: Path | None = None,
) -> dict[str, list[float]]:
    """Measure the seconds of each stage on batches of ``size`` rows.

    Args:
        predictor: The predictor to measure.
        stock: The baseline; None to measure without it.
        rows: The rows, which are repeated if there are too few.
        size: The number of rows in a batch.
        seconds: The seconds for the predictor, and for the baseline, which scores at least one
            batch.
        file: The exported file of the same model; None to measure without it.
    """
    onnx = None if file is None else open_onnx(file, size)
    times: dict[str, list[float]] = {}
    rows = rows * -(-size // len(rows))
    begins = range(0, len(rows) - size + 1, size)
    batches = itertools.cycle([rows[begin : begin + size] for begin in begins])

    def run_timed(stage: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        times.setdefault(stage, []).append(time.perf_counter() - begin)
        return result

    def score_with_ours(batch: list[dict]) -> np.ndarray:
        scores = run_timed(_OURS, lambda: predictor.predict(batch))
        raw = run_timed(_READ, lambda: predictor.read(batch))
        run_timed(_ENCODE, lambda: predictor.workflow.transform(raw))
        if onnx is not None:
            batch_tensors = tensors.to_tensors(inputs, batch)
            others = run_timed(_ONNX, lambda: onnx.run(outputs, batch_tensors))
            np.testing.assert_allclose(np.stack(others), np.atleast_2d(scores.T), atol=atol)
        return scores

    def compare_with_stock(batch: list[dict], scores: np.ndarray) -> None:
        frame = stock.make_frame(predictor.read(batch))
        others = run_timed(_STOCK, lambda: stock.predict(frame, run_timed))
        np.testing.assert_allclose(scores, others, atol=atol)

    atol = 1e-5 if predictor.model.table.kind == "float32" else 0.1
    inputs = tensors.list_inputs(predictor.row_spec)
    aggregates = predictor.spec.aggregates
    inputs += [tensors.Input(column.name, "float64", False) for column in aggregates]
    outputs = name_by_label(tensors.OUTPUT, predictor.labels)
    for batch in itertools.islice(batches, 5):  # warm up: fills caches and compiles code
        scores = score_with_ours(batch)
    if stock is not None:
        compare_with_stock(batch, scores)
    times.clear()
    ours_s = 0.0
    stock_s = 0.0
    while ours_s < seconds or (stock is not None and stock_s < seconds):
        batch = next(batches)
        scores = score_with_ours(batch)
        ours_s += times[_OURS][-1]
        if stock is not None and stock_s <= min(ours_s, seconds):
            compare_with_stock(batch, scores)
            stock_s += times[_STOCK][-1]
    return times


def open_onnx(file: Path, rows: int) -> InferenceSession:
    """Open ``model.onnx``, with as many threads as PyTorch uses for this number of rows."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    with limit_threads(rows):
        options.intra_op_num_threads = torch.get_num_threads()
    return InferenceSession(file, options)


def print_one_row(predictor: Predictor, row: dict, seconds: float) -> None:
    """Print the latency of one row, without other load and with a busy process on each core."""
    cores = count_cores()
    busy_loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    print(f"\n{'one row':36}{'p50 ms':>10}{'p99 ms':>10}")
    for name, count in (("without additional load", 0), (f"{cores} cores busy", cores)):
        others = [subprocess.Popen([sys.executable, "-c", busy_loop]) for _ in range(count)]
        try:
            time.sleep(0.5 if others else 0)  # let the processes start
            times = measure(predictor, None, [row], 1, seconds)[_OURS]
        finally:
            for other in others:
                other.kill()
                other.wait()
        p50, p99 = 1e3 * np.quantile(times, (0.5, 0.99))
        print(f"{name:36}{p50:10.3f}{p99:10.3f}")


def print_table(times_by_size: dict[int, dict[str, list[float]]]) -> None:
    """Print a line for each batch size and stage, and the ratios of stock to ours."""
    print(f"{'batch':>6}  {'':28}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}{'rows/s':>12}")
    ratios = []
    for size, times in times_by_size.items():
        medians = {stage: 1e3 * float(np.median(seconds)) for stage, seconds in times.items()}
        for stage, p50 in medians.items():
            p90, p99 = 1e3 * np.quantile(times[stage], (0.9, 0.99))
            rate = size / p50 * 1e3
            print(f"{size:>6}  {stage:28}{p50:10.3f}{p90:10.3f}{p99:10.3f}{rate:12,.0f}")
        if _STOCK in times:
            total = medians[_STOCK] / medians[_OURS]
            encode = medians[_TRANSFORM] / (medians[_READ] + medians[_ENCODE])
            ratios.append(
                f"batch {size}: {total:,.0f} times faster than stock; read and encode "
                f"{encode:,.0f} times faster than Workflow.transform"
            )
    print(*ratios, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
