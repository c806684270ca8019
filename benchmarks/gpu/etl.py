"""The ETL on a card, by stage, beside the bandwidth at which text could reach the device at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.data import LOG_DAYS, ensure_log
from benchmarks.gpu.worker import GpuSettings, Result, seconds_of
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.clicklog.text.device.tokenizer import parse_on_device
from nvt_torchrec.etl.division.plan import make_plan
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.device.blocks import Card

CASE = "ETL"
_COPIED = 256 << 20


def copies(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Copy to the device, from pinned and from pageable memory, and on it."""
    pinned = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pageable = torch.empty(_COPIED, dtype=torch.uint8)
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    again = torch.empty_like(there)
    for name, source in (
        ("limit", pinned),
        ("copy from pageable memory", pageable),
        ("copy on the device", again),
    ):
        took = seconds_of(lambda s=source: there.copy_(s, non_blocking=True), device, args.seconds)
        yield {"system": name, "case": CASE, "gb_per_s": _COPIED / took / 1e9}


def stages(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Measure the stages of a block of 64 MiB of the log, or of a day if that is smaller."""
    from nvt_torchrec.etl.engines.device.workers import worker_card

    spec = load_spec()
    days = find_days(str(ensure_log(args)))
    block = make_plan(days, spec, block_bytes=64 << 20).units[0].block
    yield from of_block(args, worker_card(), block, spec, device)


def of_block(
    args: GpuSettings, card: Card, block: Block, spec: FeatureSpec, device: torch.device
) -> Iterator[Result]:
    """Measure each stage of a block on a card alone; ``device`` is the card, as torch names it."""
    from nvt_torchrec.etl.engines.device.blocks import copy_encoded, count_rows
    from nvt_torchrec.etl.engines.engine import Job
    from nvt_torchrec.etl.engines.threads import Threads
    from nvt_torchrec.etl.parts.parquet import write_part
    from nvt_torchrec.workflows import compiled
    from nvt_torchrec.workflows.compiled.device import DeviceWorkflow
    from nvt_torchrec.workflows.writer import write_workflow

    directory = args.data / "stages"
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
        part = directory / "part.0.parquet"
        works = {
            "read into pinned memory": lambda: lane.read(block),
            "upload": lambda: there.upload(text),
            "parse": lambda: parse_on_device(there, uploaded, spec, limit),
            "count": lambda: count_rows(there, rows, block, spec),
            "encode": lambda: workflow.transform(rows.dense, rows.categorical, rows.missing),
            "copy back": lambda: copy_encoded(there, rows, encoded, workflow.schema),
            "write": lambda: write_part(table, part),
        }
        if device.type == "cuda" and find_spec("cudf"):
            works["read and parse by cudf.read_csv"] = lambda: _read_csv(block, spec)
        for name, work in works.items():
            took = seconds_of(work, device, args.seconds)
            yield _speed(f"on the card: {name}", len(rows), len(text), took)
    shutil.rmtree(directory)


def _read_csv(block: Block, spec: FeatureSpec) -> None:
    import cudf

    types = dict.fromkeys((spec.label, *spec.dense_names), "int32")
    types |= dict.fromkeys(spec.categorical_names, "hex")
    place = (block.begin, block.end - block.begin)
    cudf.read_csv(
        block.path, sep="\t", header=None, names=spec.columns, dtype=types, byte_range=place
    )


def engine_run(args: GpuSettings, device: torch.device, engine: str) -> Iterator[Result]:
    """Measure a whole run of an engine, by stage."""
    from nvt_torchrec.etl.run import run
    from nvt_torchrec.etl.settings import EtlSettings

    log, output = ensure_log(args), args.data / f"etl-{engine}"
    days = find_days(str(log))
    shutil.rmtree(output, ignore_errors=True)
    run(EtlSettings(str(log), output, load_spec(), engine=engine))
    seconds = read_json(output / "timings.json", "the time that a run took")["seconds"]
    shutil.rmtree(output)
    rows = len(days) * (args.log_rows // LOG_DAYS)
    text = sum(Path(day.path).stat().st_size for day in days)
    fit, transform = seconds["fit"], seconds["transform"]
    for stage, took in (
        ("parse + fit", fit),
        ("transform + write", transform),
        ("both", fit + transform),
    ):
        yield _speed(f"{engine} engine: {stage}", rows, text, took)


def _speed(system: str, rows: int, text: int, took: float) -> Result:
    return {
        "system": system,
        "case": CASE,
        "rows_per_s": rows / took,
        "gb_per_s": text / took / 1e9,
        "ms": 1e3 * took,
    }
