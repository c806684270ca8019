"""The ETL's stages beside the bandwidth at which text could reach the device at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.data import LOG_DAYS, ensure_log
from benchmarks.gpu.measure import Result, seconds_of
from benchmarks.gpu.worker import GpuSettings
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.clicklog.readers.raw import find_days, read_block
from nvt_torchrec.etl.plan import make_plan
from nvt_torchrec.formats.spec.toml_file import load_spec
from nvt_torchrec.workflows import to_frame

CASE = "ETL"
_COPIED = 256 << 20


def copies(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Copies to the device, from pinned and from pageable memory, and on it."""
    cuda = device.type == "cuda"
    pinned = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=cuda)
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


def block(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """The stages before encoding, of some days: parsing, by cuDF and by us, and frames of it."""
    log, gpu = ensure_log(args.data, args.log_rows), device.type == "cuda"
    spec = load_spec()
    days = find_days(str(log))
    paths = [Path(day.path) for day in days[: LOG_DAYS - 1]]  # others are the same files again

    def speed(system: str, took: float) -> Result:
        return _speed(args, paths, system, took)

    if gpu and find_spec("cudf"):
        yield speed("cudf.read_csv", seconds_of(lambda: _read_csv(paths, spec), device, 1))
    units = make_plan(days, spec, block_bytes=64 << 20).units
    blocks = [unit.block for unit in units if Path(unit.block.path) in paths]
    rawest = seconds_of(lambda: [read_block(block, spec) for block in blocks], device, 0)
    yield speed("our tokenizer, one thread", rawest)
    if gpu and find_spec("cudf"):
        parsed = [read_block(block, spec) for block in blocks]
        took = seconds_of(lambda: [to_frame(one, spec, gpu=True) for one in parsed], device, 1)
        yield speed("parsed rows to cuDF frames", took)


def cpu_engine(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """A whole run of the cpu engine, by stage."""
    yield from _engine(args, "cpu")


def dask_engine(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """A whole run of the dask engine on the same log, by stage."""
    yield from _engine(args, "dask")


def _engine(args: GpuSettings, engine: str) -> Iterator[Result]:
    log = ensure_log(args.data, args.log_rows)
    paths = [Path(day.path) for day in find_days(str(log))]
    for stage, took in _run(args, log, engine):
        yield _speed(args, paths, f"{engine} engine: {stage}", took)


def _speed(args: GpuSettings, paths: list[Path], system: str, took: float) -> Result:
    return {
        "system": system,
        "case": CASE,
        "rows_per_s": len(paths) * (args.log_rows // LOG_DAYS) / took,
        "gb_per_s": sum(path.stat().st_size for path in paths) / took / 1e9,
        "ms": 1e3 * took,
    }


def _read_csv(paths: list[Path], spec) -> None:
    import cudf

    types = {spec.label: "int32"}
    types |= dict.fromkeys(spec.dense_names, "int32")
    types |= dict.fromkeys(spec.categorical_names, "hex")
    for path in paths:
        cudf.read_csv(path, sep="\t", header=None, names=spec.columns, dtype=types)


def _run(args: GpuSettings, log: Path, engine: str) -> Iterator[tuple[str, float]]:
    """Stages of a run, and the seconds they took."""
    from nvt_torchrec.etl.run import run
    from nvt_torchrec.etl.settings import EtlSettings

    output = args.data / f"etl-{engine}"
    shutil.rmtree(output, ignore_errors=True)
    run(EtlSettings(str(log), output, load_spec(), engine=engine))
    seconds = read_json(output / "timings.json", "the time that a run took")["seconds"]
    shutil.rmtree(output)
    yield "parse + fit", seconds["fit"]
    yield "transform + write", seconds["transform"]
    yield "both", seconds["fit"] + seconds["transform"]
