"""Each stage of the ETL of a block on a GPU, beside the bandwidth of copies to it.

GB/s are of text. "x limit" is against copying from pinned memory, as fast as text could get there.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import dataclasses
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.data import make_once
from benchmarks.harness import Metric, Table, run_benchmark, run_etl
from benchmarks.process import BUILD, Run
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.clicklog.text.device import parse_on_device
from nvt_torchrec.etl.units.plan import make_plan
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.device.blocks import Card

METRICS = (
    Metric("rows_per_s", "M rows/s", ".3f", scale=1e-6),
    Metric("gb_per_s", "GB/s", ".2f", ratio=True),
    Metric("ms", "ms", ",.2f"),
)
LIMIT = "limit"
_COPIED, _DAYS = 256 << 20, 3

#: What was done, its rows and bytes, and seconds.
Stage = tuple[str, int, int, float]


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("rows of the log to make", 3_000_000, least=_DAYS)
    seconds: float = flag("seconds that each stage is measured for", 2.0)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    return run_benchmark("stages", __doc__, BenchmarkSettings, _run, argv)


def _run(settings: BenchmarkSettings) -> None:
    if not torch.cuda.is_available():
        raise SettingsError("torch sees no GPU here", "python -m etl doctor says why")
    from nvt_torchrec.etl.engines.device.workers import worker_card

    log, spec = BUILD / "gpu-log", load_spec()
    each = ("--days", _DAYS, "--rows_per_day", settings.rows // _DAYS)
    make_once(
        log,
        f"a log of {settings.rows} rows",
        lambda: run_etl("synthesize", "--output_path", log, *each),
    )
    block = make_plan(find_days(str(log)), spec, block_bytes=64 << 20).units[0].block
    table = Table("stages", f"On {torch.cuda.get_device_name()}", METRICS, base=LIMIT)
    device, work = torch.device("cuda", 0), BUILD / "stages"
    for stages in (
        copies(device, settings.seconds),
        of_block(worker_card(), block, spec, work, settings.seconds),
    ):
        for name, rows, size, took in stages:
            figures = {"rows_per_s": rows / took, "gb_per_s": size / took / 1e9, "ms": 1e3 * took}
            table.runs[name, ""] = [Run(took, 0.0, 0.0, figures)]
    table.print()
    print(f"written to {table.write()}")


def copies(device: torch.device, seconds: float) -> Iterator[Stage]:
    """Copy to the device, from pinned and from pageable memory, and on it."""
    pinned = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    sources = {LIMIT: pinned, "copy from pageable memory": torch.empty(_COPIED, dtype=torch.uint8)}
    for name, source in {**sources, "copy on the device": torch.empty_like(there)}.items():
        took = seconds_of(lambda source=source: there.copy_(source, non_blocking=True), seconds)
        yield name, 0, _COPIED, took


def of_block(
    card: Card, block: Block, spec: FeatureSpec, directory: Path, seconds: float
) -> Iterator[Stage]:
    """Measure each stage of a block on a card alone; ``directory`` is made and removed."""
    from nvt_torchrec.etl.engines.device.blocks import copy_encoded, count_rows
    from nvt_torchrec.etl.engines.engine import Job
    from nvt_torchrec.etl.engines.host import Threads
    from nvt_torchrec.etl.parts.parquet import write_part
    from nvt_torchrec.workflows import compiled
    from nvt_torchrec.workflows.compiled.device import DeviceWorkflow
    from nvt_torchrec.workflows.writer import write_workflow

    shutil.rmtree(directory, ignore_errors=True)
    fitted = Threads(Job(spec, directory)).fit([block], lambda rows: None)
    write_workflow(directory / "workflow", spec, fitted)
    there, limit = card.device, spec.input.line_limit
    workflow = DeviceWorkflow(there, compiled.load(directory / "workflow"))
    with card.lane() as lane:
        text = lane.read(block)
        uploaded = there.upload(text)
        rows = parse_on_device(there, uploaded, spec, limit)
        if rows is None:
            raise ValueError(f"{block.source}: malformed, make the data again")
        encoded = workflow.transform(rows.dense, rows.categorical, rows.missing)
        _, (table, _) = copy_encoded(there, rows, encoded, workflow.schema)
        works = {
            "read into pinned memory": lambda: lane.read(block),
            "upload": lambda: there.upload(text),
            "parse": lambda: parse_on_device(there, uploaded, spec, limit),
            "count": lambda: count_rows(there, rows, block, spec),
            "encode": lambda: workflow.transform(rows.dense, rows.categorical, rows.missing),
            "copy back": lambda: copy_encoded(there, rows, encoded, workflow.schema),
            "write": lambda: write_part(table, directory / "part.0.parquet"),
        }
        if torch.cuda.is_available() and find_spec("cudf"):
            works["read and parse by cudf.read_csv"] = lambda: _read_csv(block, spec)
        for name, work in works.items():
            yield name, len(rows), len(text), seconds_of(work, seconds)
    shutil.rmtree(directory)


def _read_csv(block: Block, spec: FeatureSpec) -> None:
    import cudf

    types = dict.fromkeys((spec.label, *spec.dense_names), "int32")
    types |= dict.fromkeys(spec.categorical_names, "hex")
    place = (block.begin, block.end - block.begin)
    cudf.read_csv(
        block.path, sep="\t", header=None, names=spec.columns, dtype=types, byte_range=place
    )


def seconds_of(work: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of one call; the first call is not counted."""
    work()
    taken, end = [], time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        _settle()
        begin = time.perf_counter()
        work()
        _settle()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
