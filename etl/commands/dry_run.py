"""Estimate what a run would do and need, by running it on the first rows of the log."""

from __future__ import annotations

import dataclasses
import logging
import resource
import shutil
import tempfile
from pathlib import Path

from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.clicklog.readers.lines import unpacked_head
from nvt_torchrec.clicklog.readers.raw import DayFile, find_days
from nvt_torchrec.clicklog.readers.text_rows import end_of_rows
from nvt_torchrec.etl.engines.device import supports
from nvt_torchrec.etl.engines.engine import resolve
from nvt_torchrec.etl.engines.hardware import BLOCKS_AT_ONCE, cores, gpu_count
from nvt_torchrec.etl.output import check_output
from nvt_torchrec.etl.plan import make_plan
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.staging import estimate
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.split import BY_DAYS
from nvt_torchrec.formats.splits import SPLITS

#: Rows of the sample by engine: what it processes within seconds.
SAMPLE_ROWS = {"cpu": 100_000, "dask": 100_000, "nvtabular": 20_000}
#: Memory of a worker that NVTabular works in, in multiples of its block: raw text, typed columns,
#: merged codes.
MEMORY_PER_BLOCK = 12
#: Bytes of memory of a thread: a block and its columns; of a Dask worker without any data.
MEMORY_PER_THREAD, MEMORY_PER_WORKER = 120 << 20, 250 << 20


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of the log.

    Attributes:
        rows: The number of rows, estimated from the first lines.
        text_bytes: The size of the decompressed text.
        unpacked_bytes: The decompressed size of the compressed days.
        lines: Lines to print on the splits or the compressed days.
    """

    rows: int
    text_bytes: int
    unpacked_bytes: int
    lines: list[str]


@dataclasses.dataclass(frozen=True)
class Needs:
    """The resources of a run.

    Attributes:
        disk_bytes: The size of the parquet.
        memory_bytes: The memory of all workers together.
        seconds: The time to fit and transform, from the speed on the sample.
    """

    disk_bytes: int
    memory_bytes: int
    seconds: float


def dry_run(settings: EtlSettings) -> str:
    """Return a text that describes what a run would do; write nothing below the output path.

    Raises:
        ClickLogError: What the run would raise at its start, or in its first rows.
    """
    settings = resolve(settings)
    days = find_days(settings.input_path, settings.days, split=settings.spec.split)
    check_output(settings.output_path, resume=settings.resume, restart=settings.restart)
    with tempfile.TemporaryDirectory() as directory:
        sample = _sample(settings, days, Path(directory))
        packed = any(day.compressed for day in days)
        size = _estimated(settings, days, sample) if packed else _planned(settings, days)
        needs = _measure(settings, sample, size, Path(directory))
    free = shutil.disk_usage(_existing(settings.output_path)).free
    needed = needs.disk_bytes + size.unpacked_bytes
    unpacked = f", {size.unpacked_bytes / 1e9:.2f} GB of it decompressed input, for the run only"
    return "\n".join(
        [
            f"  engine: {settings.engine}",
            *(f"  {day.path}: {day.size / 1e6:.1f} MB" for day in days),
            *size.lines,
            f"  rows  : about {size.rows:,}",
            f"  disk  : about {needed / 1e9:.2f} GB below {settings.output_path}"
            f"{unpacked if size.unpacked_bytes else ''} ({free / 1e9:.1f} GB free)",
            f"  memory: about {needs.memory_bytes / 1e9:.1f} GB for all workers, and the "
            "vocabularies",
            f"  time  : about {needs.seconds / 60:.1f} min to fit and transform, longer where "
            "vocabularies have millions of values",
        ]
    )


def _sample(settings: EtlSettings, days: list[DayFile], directory: Path) -> EtlSettings:
    """Return settings of a run over the first rows of the first and the last day.

    By another split than by days, it is one file, of which rows are split like those of a day: the
    first rows may all be of one time.
    """
    plain = [day for day in days if not day.compressed]
    path = settings.input_path if plain else str(_unpacked_head(days[0], directory, settings.spec))
    rows = SAMPLE_ROWS[settings.engine] // 2
    spec = settings.spec
    if spec.split.by != "days":
        columns = spec.input.columns
        if spec.input.format != "parquet" and not spec.input.header:
            columns = tuple(spec.file_columns(label=True))
        reading = dataclasses.replace(spec.input, columns=columns)
        spec = dataclasses.replace(spec, split=BY_DAYS, input=reading)
        path, plain = (plain[0].path if plain else path), plain[:1]
    return dataclasses.replace(
        settings,
        spec=spec,
        input_path=path,
        output_path=directory / "out",
        days=frozenset({plain[0].day, plain[-1].day}) if plain and spec is settings.spec else None,
        limit_rows=min(rows, settings.limit_rows or rows) if plain else rows,
        workers=1,
        scheduler=None,  # its workers need not see this directory
        shuffle="none",
        max_bad_fraction=1.0,
        resume=False,
        restart=False,
    )


def _unpacked_head(day: DayFile, directory: Path, spec: FeatureSpec) -> Path:
    """Write the whole rows that the first bytes of a compressed file decompress to."""
    path = directory / Path(day.path).name.rsplit(".", 1)[0]
    text, _, whole = unpacked_head(day.path)
    path.write_bytes(text if whole else text[: end_of_rows(text, spec)])
    return path


def _planned(settings: EtlSettings, days: list[DayFile]) -> Size:
    plan = make_plan(
        days, settings.spec, block_bytes=settings.block_mb << 20, limit_rows=settings.limit_rows
    )
    if settings.spec.split.by not in ("days", "files"):
        line = f"  {plan.text_bytes() / 1e6:.1f} MB in {len(plan.blocks)} blocks, whose rows are "
        line += f"divided by {settings.spec.split.by}"
        return Size(plan.estimated_rows(), plan.text_bytes(), 0, [line])
    parts = {split: sum(unit.split == split for unit in plan.units) for split in SPLITS}
    lines = [
        f"  {split:6}: {plan.text_bytes(split) / 1e6:10.1f} MB of text in {parts[split]} parts"
        for split in SPLITS
    ]
    return Size(plan.estimated_rows(), plan.text_bytes(), 0, lines)


def _estimated(settings: EtlSettings, days: list[DayFile], sample: EtlSettings) -> Size:
    """Estimate the size from the first bytes of each compressed day."""
    plan = make_plan(
        find_days(sample.input_path, sample.days),
        sample.spec,
        block_bytes=1 << 30,
        limit_rows=sample.limit_rows,
    )
    packed = [estimate(day, Path()) for day in days if day.compressed]
    unpacked = sum(day.estimate for day in packed)
    ratio = unpacked / sum(day.day.size for day in packed)
    text_bytes = unpacked + sum(day.size for day in days if not day.compressed)
    rows = round(text_bytes * plan.estimated_rows() / plan.text_bytes())
    if settings.limit_rows:
        rows = min(rows, settings.limit_rows * len(days))
    line = (
        f"  {len(packed)} of {len(days)} days are compressed, 1 : {ratio:.1f} in the first bytes: "
        f"about {unpacked / 1e6:.1f} MB"
    )
    return Size(rows, text_bytes, unpacked, [line])


def _measure(settings: EtlSettings, sample: EtlSettings, size: Size, directory: Path) -> Needs:
    """Run the sample, with one worker."""
    log = logging.getLogger("nvt_torchrec.etl")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        # the first run of the cpu engine loads its compiled code
        for again in range(2 if settings.engine == "cpu" else 1):
            output = directory / f"out_{again}"
            manifest = run(dataclasses.replace(sample, output_path=output))
    finally:
        log.setLevel(level)
    rows = max(1, manifest["rows"]["out"])
    written = sum(file["bytes"] for file in manifest["files"])
    speed = read_json(EtlOutput(output).timings, "the sample's timings")["rows_per_s"] or 1
    workers = settings.workers or gpu_count() or cores()
    if settings.engine == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        memory = peak + (workers - 1) * MEMORY_PER_THREAD
    else:
        memory = workers * _worker_memory(settings, size)
    return Needs(
        disk_bytes=round(written / rows * size.rows),
        memory_bytes=memory,
        seconds=size.rows / speed / workers,
    )


def _worker_memory(settings: EtlSettings, size: Size) -> int:
    """Return the bytes of main memory that a Dask worker takes for its blocks."""
    block, gpu = settings.block_mb << 20, gpu_count() > 0
    if settings.engine == "nvtabular":
        return BLOCKS_AT_ONCE[gpu] * block * MEMORY_PER_BLOCK
    if gpu and supports(settings.spec) and settings.spec.split.by in ("days", "files"):
        from nvt_torchrec.etl.engines.device.blocks import host_bytes

        return host_bytes(settings.spec, block, round(block * size.rows / size.text_bytes))
    return MEMORY_PER_WORKER + MEMORY_PER_THREAD


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
