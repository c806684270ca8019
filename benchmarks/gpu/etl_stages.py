"""The stages through which a block of a log goes on a card, each alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.data import ensure_log
from benchmarks.gpu.etl import CASE
from benchmarks.gpu.measure import Result, seconds_of
from benchmarks.gpu.worker import GpuSettings
from nvt_torchrec.clicklog.readers.raw import Block, find_days
from nvt_torchrec.clicklog.readers.text_rows import line_limit
from nvt_torchrec.clicklog.text.device.tokenizer import parse_on_device
from nvt_torchrec.etl.plan import make_plan
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.toml_file import load_spec

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.device_blocks import Card


def stages(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """A block of 64 MiB of the log, or the first day if it is smaller."""
    from nvt_torchrec.etl.engines.device import worker_card

    spec = load_spec()
    days = find_days(str(ensure_log(args.data, args.log_rows)))
    block = make_plan(days, spec, block_bytes=64 << 20).units[0].block
    yield from of_block(args, worker_card(), block, spec, device)


def of_block(
    args: GpuSettings, card: Card, block: Block, spec: FeatureSpec, device: torch.device
) -> Iterator[Result]:
    """The stages of one block on a card; ``device`` is the same card, as torch names it."""
    from nvt_torchrec.etl.engines.device_blocks import count_rows
    from nvt_torchrec.etl.engines.device_parquet import write_on_device
    from nvt_torchrec.workflows import compiled
    from nvt_torchrec.workflows.compiled.device import DeviceWorkflow

    directory = args.data / "stages"
    shutil.rmtree(directory, ignore_errors=True)
    write_fitted(directory, block, spec)
    there, limit = card.device, line_limit(spec)
    workflow = DeviceWorkflow(there, compiled.load(directory / "workflow"))
    with card.lane() as lane:
        text = lane.read(block)
        uploaded = there.upload(text)
        rows = parse_on_device(there, uploaded, spec, limit)
        if rows is None:
            raise ValueError(f"{block.source}: malformed, make the data again")
        encoded = workflow.transform(rows.dense, rows.categorical, rows.missing)
        part = directory / "part.0.parquet"
        works = {
            "read into pinned memory": lambda: lane.read(block),
            "upload": lambda: there.upload(text),
            "parse": lambda: parse_on_device(there, uploaded, spec, limit),
            "count": lambda: count_rows(there, rows, block, spec),
            "encode": lambda: workflow.transform(rows.dense, rows.categorical, rows.missing),
            "write": lambda: write_on_device(
                there, rows.label, encoded.dense, encoded.ids, workflow.schema, part
            ),
        }
        for name, work in works.items():
            took = seconds_of(work, device, args.seconds)
            yield {
                "system": f"on the card: {name}",
                "case": CASE,
                "rows_per_s": len(rows) / took,
                "gb_per_s": len(text) / took / 1e9,
                "ms": 1e3 * took,
            }
    shutil.rmtree(directory)


def write_fitted(directory: Path, block: Block, spec: FeatureSpec) -> None:
    """Write a workflow fitted on the block, as ``directory/workflow``."""
    from nvt_torchrec.etl.engines import cpu
    from nvt_torchrec.workflows import write_workflow

    fitted = cpu.fit([block], spec, directory / "fit", workers=1, reject=False)
    write_workflow(directory / "workflow", spec, fitted)
