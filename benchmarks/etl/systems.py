"""The log that is read, and the programs that are compared: their start, and where they write.

``etl synthesize`` draws values by Zipf's law with the exponent 1.5: few are rare, and two million
rows hold some ten thousand values of a column. Of a real log's largest columns a good part of the
rows hold values that are seen once or twice, which is what vocabularies cost. So a share of the
rows get another value in these columns, drawn evenly out of two million.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import make_once
from benchmarks.etl.verify import list_parts
from benchmarks.harness import Metric, System, run_etl
from benchmarks.process import BUILD
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.clicklog.synthetic.log import SyntheticSettings, synthesize
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.splits import SPLITS

HERE = Path(__file__).parent
#: What is shown of a case of the ETL.
CASE_METRICS = (
    Metric("rows_per_s", "rows/s"),
    Metric("wall_s", "wall s", ".1f"),
    Metric("cpu_s", "CPU s", ".1f"),
    Metric("peak_rss_mb", "peak MB"),
)
DAYS = 8
#: The columns with millions of values in MLPerf's list of cardinalities.
_LARGEST = ("cat_0", "cat_9", "cat_10", "cat_19", "cat_20", "cat_21")
_RARE_VALUES = 2_000_000
#: The share of the rows that get one of these values, in each of these columns.
_RARE = 0.25


#: What pip is given for the environment of a peer. NVTabular as it was used in 2024, without
#: dependencies: plain pip takes a package of RAPIDS that another index has, and tritonclient, with
#: which `import merlin` fails; later versions of pip refuse merlin-dataloader's metadata.
POLARS, NVTABULAR = "polars", "nvtabular"
_INSTALLED = {
    POLARS: [["polars==2.1.0", "polars-runtime-32==2.1.0"]],
    "fastapi": [
        ["fastapi==0.165.0", "uvicorn[standard]==0.54.0", "onnxruntime==1.32.0", "numpy==2.4.6"]
    ],
    "catboost": [["catboost==1.2.10", "pyarrow==26.0.1", "scikit-learn==1.9.1"]],
    "events": [["duckdb==2.0.1", "polars==2.1.0", "polars-runtime-32==2.1.0"]],
    NVTABULAR: [["pip==24.0"], ["--no-deps", *(HERE / "nvtabular.txt").read_text().split()]],
}


def find_python(peer: str) -> Path:
    """Return the interpreter of a peer's environment, which :func:`build_environment` makes."""
    return BUILD / f"venv-{peer}" / "bin" / "python"


def build_environment(peer: str) -> None:
    """Build a peer's environment unless it is up to date. Raises :class:`ClickLogError`."""

    def install() -> None:
        venv.create(BUILD / f"venv-{peer}", with_pip=True)
        for arguments in _INSTALLED[peer]:
            command = [find_python(peer), "-m", "pip", "install", "--quiet", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                what = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
                remedy = f"see `{' '.join(map(str, command))}`"
                raise ClickLogError(f"{peer}: cannot be installed: {what}", remedy)

    make_once(BUILD / f"venv-{peer}", f"{_INSTALLED[peer]} {sys.version}", install)


def make_log(path: Path, rows: int) -> None:
    """Make ``day_0`` …, of so many rows together, in ``path``, unless they exist."""
    each = rows // DAYS

    def make() -> None:
        synthesize(path, SyntheticSettings(DAYS, each, cardinality_scale=0.05))
        fields = [load_spec().columns.index(name) for name in _LARGEST]
        generator = np.random.default_rng(1)
        values = generator.integers(0, 2**32, (len(fields), _RARE_VALUES), np.uint32)
        for day in range(DAYS):
            _add_rare(path / f"day_{day}", fields, values, seed=day)

    make_once(path, f"a log of {each * DAYS} rows", make)


def _add_rare(path: Path, fields: list[int], values: np.ndarray, seed: int) -> None:
    lines = path.read_text().splitlines()
    generator = np.random.default_rng(seed)
    chosen = generator.random((len(lines), len(fields))) < _RARE
    drawn = generator.integers(0, values.shape[1], chosen.shape)
    with open(path, "w") as out:
        for line, replaced, at in zip(lines, chosen, drawn, strict=True):
            row = line.split("\t")
            for i in np.flatnonzero(replaced):
                row[fields[i]] = f"{values[i, at[i]]:08x}"
            out.write("\t".join(row) + "\n")


def list_output(output: Path) -> list[Path]:
    """Return the parquet files that a system wrote, in the order of the log's rows."""
    splits = output / "criteo_binary" / "split"
    if splits.exists():  # ours
        return list_parts(splits, *SPLITS)
    last = ("last_day",) if (output / "last_day").exists() else SPLITS[1:]
    return list_parts(output, SPLITS[0], *last)


def etl(name: str, output: Path, *flags: Any, **more: Any) -> System:
    """Measure the whole process of ``python -m etl run``."""
    arguments = ["run", *map(str, flags), "--output_path"]
    remove = functools.partial(shutil.rmtree, output, ignore_errors=True)

    def warm_up() -> None:
        """Compile Numba's kernels, which are cached."""
        remove()
        run_etl(*arguments, output, "--limit_rows", "500")

    return System(
        name,
        "",
        [sys.executable, "-m", "etl", *arguments, output],
        prepare=warm_up,
        before=remove,
        result=lambda: {"rows": json.loads((output / "manifest.json").read_text())["rows"]["out"]},
        **more,
    )


def etl_case(case: str, output: Path, *flags: Any, name: str = "ours") -> System:
    """Measure a case of the ETL; the whole log is read once before, to compile what is cached.

    Of the first rows of a log in the order of time there would be no valid or test.
    """
    system = etl(name, output, *flags)

    def prepare() -> None:
        system.before()
        run_etl("run", *flags, "--output_path", output)

    return dataclasses.replace(system, case=case, prepare=prepare)


def peer(
    name: str, peer: str, log: Path, rows: int, output: Path, *flags: str, **more: Any
) -> System:
    """Measure a program of this folder, in the peer's own environment."""
    program = HERE / f"peer_{peer}.py"
    return System(
        name,
        "",
        [find_python(peer), program, "--input", log, "--output", output, *flags],
        prepare=lambda: build_environment(peer),
        before=lambda: shutil.rmtree(output, ignore_errors=True),
        result=lambda: {"rows": rows},
        **more,
    )
