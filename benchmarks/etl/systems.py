"""The programs that are compared: how they are started, and where they write."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.etl.verify import Output, parts, read_parquet_column
from benchmarks.harness import ROOT, System
from benchmarks.process import run
from benchmarks.venvs import Peer, PeerError
from nvt_torchrec.formats.splits import SPLITS

HERE = Path(__file__).parent

POLARS = Peer("polars", ("polars==2.1.0", "polars-runtime-32==2.1.0"))
#: As it was used in 2024. Without dependencies: plain pip takes a package of RAPIDS that another
#: index has, and tritonclient, with which `import merlin` fails.
NVTABULAR = Peer(
    "nvtabular",
    tuple((HERE / "nvtabular.txt").read_text().split()),
    tools=("pip==24.0",),  # later ones refuse merlin-dataloader's metadata
    no_deps=True,
)


@dataclasses.dataclass(frozen=True)
class Log:
    """A raw log of 8 days, how many rows it has, and where outputs go."""

    path: Path
    rows: int
    work: Path
    threads: int


def output_of(log: Log, name: str, case: str) -> Path:
    """Return where a system writes."""
    return log.work / f"{name} {case}".replace(" ", "_")


def ours(log: Log, engine: str, name: str, case: str, *flags: str, **more: Any) -> System:
    """Measure the whole process of ``python -m etl run``."""
    output, warm_up_output = output_of(log, name, case), log.work / "warm_up"
    command = [sys.executable, "-m", "etl", "run", "--engine", engine, *flags]
    command += ["--input_path", str(log.path), "--workers", str(log.threads), "--output_path"]

    def warm_up() -> None:
        """Compile Numba's kernels, which are cached."""
        shutil.rmtree(warm_up_output, ignore_errors=True)
        done = run([*command, warm_up_output, "--limit_rows", "500"], cwd=ROOT, result=dict)
        shutil.rmtree(warm_up_output, ignore_errors=True)
        if done.error:
            raise PeerError(f"{' '.join(command)}: {done.error}")

    return System(
        name,
        case,
        [*command, output],
        prepare=warm_up,
        before=lambda: shutil.rmtree(output, ignore_errors=True),
        result=lambda: {"rows": json.loads((output / "manifest.json").read_text())["rows"]["out"]},
        **more,
    )


def peer(log: Log, peer: Peer, name: str, *flags: str, case: str, **more: Any) -> System:
    """Measure a program of this folder in the peer's own environment."""
    output = output_of(log, name, case)
    program = HERE / f"peer_{peer.name}.py"
    command = [peer.python, program, "--input", log.path, "--output", output, *flags]
    return System(
        name,
        case,
        command,
        env={"POLARS_MAX_THREADS": str(log.threads)} if peer is POLARS else {},
        rows=log.rows,
        prepare=peer.ensure,
        before=lambda: shutil.rmtree(output, ignore_errors=True),
        **more,
    )


def our_output(directory: Path) -> Output:
    """Read what ``python -m etl run`` wrote."""
    from nvt_torchrec.workflows import inspect

    description = inspect(directory / "workflow")

    def vocabulary(name: str, suffix: str = "") -> np.ndarray:
        stored = description.vocabularies[name]
        return read_parquet_column(directory / "workflow" / stored.file, stored.name + suffix)

    splits = directory / "criteo_binary" / "split"
    return Output(
        [parts(splits / name) for name in SPLITS],
        lambda name: vocabulary(name, "_size"),
        vocabulary,
    )


def polars_output(directory: Path) -> Output:
    """Read what the program for Polars wrote."""

    def vocabulary(name: str, column: str) -> np.ndarray:
        file = directory / "vocabulary" / f"{name}.parquet"
        return read_parquet_column(file, column).astype(np.int64)

    return Output(
        [parts(directory / name) for name in SPLITS],
        lambda name: vocabulary(name, "len"),
        lambda name: vocabulary(name, name),
    )


def nvtabular_output(directory: Path) -> Output:
    """Read what the program for NVTabular wrote; values are strings and are not compared."""

    def counts(name: str) -> np.ndarray:
        file = directory / "categories" / f"unique.{name}.parquet"
        return read_parquet_column(file, f"{name}_size").astype(np.int64)

    return Output([parts(directory / name) for name in ("train", "last_day")], counts)
