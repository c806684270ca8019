"""What a run would do and need, measured on the first rows of the log itself."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
import warnings
from pathlib import Path

from clicklog.errors import BadInputError
from clicklog.raw import find_days, read_block, read_bytes
from clicklog.splits import SPLITS
from etl.output import check_output
from etl.plan import Plan, make_plan
from etl.settings import EtlSettings

SAMPLE_BYTES = 4 << 20
#: Peak memory of a worker over the size of its block: raw text, typed columns, merged codes.
MEMORY_PER_BLOCK = 12


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a run needs.

    Attributes:
        rows: estimated from the first lines.
        disk_bytes: of the parquet.
        memory_bytes: all workers together.
        seconds: fit and transform, by the speed of this machine on the sample.
    """

    rows: int
    disk_bytes: int
    memory_bytes: int
    seconds: float


def dry_run(settings: EtlSettings) -> str:
    """A text that says what a run would do. Writes nothing below the output path."""
    days = find_days(settings.input_path, settings.days)
    check_output(settings.output_path, resume=settings.resume, restart=settings.restart)
    packed = [day for day in days if day.compressed]
    if packed:
        listed = "\n".join(f"  {day.path}: {day.size / 1e6:.1f} MB" for day in days)
        return (
            f"{listed}\n{len(packed)} of {len(days)} days are compressed: a run decompresses them "
            f"below {settings.output_path}/.work first. Decompress them yourself to see more."
        )
    plan = make_plan(
        days, settings.spec, block_bytes=settings.block_mb << 20, limit_rows=settings.limit_rows
    )
    needs = _measure(plan, settings)
    free = shutil.disk_usage(_existing(settings.output_path)).free
    lines = [f"  {day.path}: {day.size / 1e6:.1f} MB" for day in days]
    for split in SPLITS:
        units = [unit for unit in plan.units if unit.split == split]
        size = plan.text_bytes(split)
        lines.append(f"  {split:5}: {size / 1e6:10.1f} MB of text in {len(units)} parts")
    lines += [
        f"  rows  : about {needs.rows:,}",
        f"  disk  : about {needs.disk_bytes / 1e9:.2f} GB below {settings.output_path} "
        f"({free / 1e9:.1f} GB free)",
        f"  memory: about {needs.memory_bytes / 1e9:.1f} GB for all workers, and for each of them "
        "the vocabularies",
        f"  time  : about {needs.seconds / 60:.1f} min to fit and transform, longer where "
        "vocabularies have millions of values",
    ]
    return "\n".join(lines)


def _measure(plan: Plan, settings: EtlSettings) -> Needs:
    """Fit and transform the first rows in this process."""
    from etl.engines import cores, gpu_count
    from etl.parquet import write_part

    gpus = gpu_count()
    import nvtabular

    from etl.engine_dask import transform_rows
    from workflows import save, to_frame
    from workflows.graph import build

    spec = settings.spec
    block = plan.units[0].block
    text = read_bytes(block.path, block.begin, min(block.end, block.begin + SAMPLE_BYTES))
    sample = dataclasses.replace(block, end=block.begin + (text.rfind(b"\n") + 1 or len(text)))
    rows = read_block(sample, spec, reject=settings.reject)
    if not len(rows):
        raise BadInputError(f"{block.source}: no good row in its first {len(text)} bytes")
    gpu = gpus > 0
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin = time.perf_counter()
        workflow = build(spec, directory)
        workflow.fit(nvtabular.Dataset(to_frame(rows, spec, gpu=gpu), cpu=not gpu))
        schema = save(workflow, spec, Path(directory) / "workflow").table_schema
        table = transform_rows(rows, workflow, schema, spec, gpu=gpu)
        write_part(table, Path(directory) / "part.parquet")
        seconds = time.perf_counter() - begin
        size = (Path(directory) / "part.parquet").stat().st_size
    workers = settings.workers or gpus or cores()
    return Needs(
        rows=plan.estimated_rows(),
        disk_bytes=round(size / len(rows) * plan.estimated_rows()),
        memory_bytes=workers * (settings.block_mb << 20) * MEMORY_PER_BLOCK,
        seconds=seconds / len(rows) * plan.estimated_rows() / workers,
    )


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
