"""Generate the log, and define the programs that are compared.

``etl synthesize`` draws values by Zipf's law with exponent 1.5, so rare values are few: two million
rows contain about ten thousand values of a column. In the largest columns of a real log, many rows
have values that occur once or twice, and these values make up the cost of vocabularies. So in these
columns, a share of the rows gets another value, drawn uniformly from two million.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.data import make_once
from benchmarks.etl.verify import list_parts
from benchmarks.harness import Metric, System, run_etl
from benchmarks.process import BUILD
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.clicklog.synthetic.log import SyntheticSettings, synthesize
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.splits import SPLITS

HERE = Path(__file__).parent
#: The metrics of benchmarks with several cases of the ETL.
CASE_METRICS = (
    Metric("rows_per_s", "rows/s"),
    Metric("wall_s", "wall s", ".1f"),
    Metric("cpu_s", "CPU s", ".1f"),
    Metric("peak_rss_mb", "peak MB"),
)
DAYS = 8
#: The columns with millions of values in MLPerf's list of cardinalities.
_LARGEST = ("cat_0", "cat_9", "cat_10", "cat_19", "cat_20", "cat_21")
#: The number of rare values.
_RARE_VALUES = 2_000_000
#: The share of the rows that get a rare value, in each of these columns.
_RARE_SHARE = 0.25

POLARS = "polars"
NVTABULAR = "nvtabular"
#: Peer → arguments of each call of pip. NVTabular is installed in its versions of 2024 without
#: dependencies: with them, pip would ask for a RAPIDS package from another index, and install a
#: tritonclient with which `import merlin` fails. Later versions of pip refuse the metadata of
#: merlin-dataloader.
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
                problem = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
                remedy = f"run `{' '.join(map(str, command))}` to see all of its output"
                raise ClickLogError(f"{peer} cannot be installed: {problem}", remedy)

    make_once(BUILD / f"venv-{peer}", f"{_INSTALLED[peer]} {sys.version}", install)


def make_log(path: Path, rows: int) -> None:
    """Generate the days ``day_0`` … in ``path`` unless they exist; ``rows`` is their total."""
    day_rows = rows // DAYS

    def make() -> None:
        synthesize(path, SyntheticSettings(DAYS, day_rows, cardinality_scale=0.05))
        fields = [load_spec().columns.index(name) for name in _LARGEST]
        generator = np.random.default_rng(1)
        values = generator.integers(0, 2**32, (len(fields), _RARE_VALUES), np.uint32)
        for day in range(DAYS):
            _add_rare(path / f"day_{day}", fields, values, seed=day)

    make_once(path, f"a log of {day_rows * DAYS} rows", make)


def _add_rare(path: Path, fields: list[int], values: np.ndarray, seed: int) -> None:
    """Replace values of a day by rare ones.

    Args:
        path: The day's file, which is rewritten.
        fields: The fields to change, counted from 0.
        values: The rare values of each field, uint32 [fields, values].
        seed: The seed.
    """
    lines = path.read_text().splitlines()
    generator = np.random.default_rng(seed)
    is_replaced = generator.random((len(lines), len(fields))) < _RARE_SHARE
    indices = generator.integers(0, values.shape[1], is_replaced.shape)
    with open(path, "w") as out:
        for line, line_is_replaced, line_indices in zip(lines, is_replaced, indices, strict=True):
            row = line.split("\t")
            for i in np.flatnonzero(line_is_replaced):
                row[fields[i]] = f"{values[i, line_indices[i]]:08x}"
            out.write("\t".join(row) + "\n")


def list_output(output: Path) -> list[Path]:
    """Return the parquet files that a system wrote, in the order of the log's rows."""
    splits = output / "criteo_binary" / "split"
    if splits.exists():  # ours
        return list_parts(splits, *SPLITS)
    last = ("last_day",) if (output / "last_day").exists() else SPLITS[1:]
    return list_parts(output, SPLITS[0], *last)


def make_etl_system(name: str, output: Path, *flags: Any, **options: Any) -> System:
    """Make a system that runs ``python -m etl run``.

    Args:
        name: The name of the system.
        output: The output directory.
        flags: The flags of the command, without ``--output_path``.
        options: More fields of :class:`System`.
    """
    arguments = ["run", *map(str, flags), "--output_path"]
    remove = functools.partial(shutil.rmtree, output, ignore_errors=True)

    def warm_up() -> None:
        """Fill the cache of Numba's compiled kernels."""
        remove()
        run_etl(*arguments, output, "--limit_rows", "500")

    return System(
        name,
        "",
        [sys.executable, "-m", "etl", *arguments, output],
        prepare=warm_up,
        before=remove,
        result=lambda: {"rows": json.loads((output / "manifest.json").read_text())["rows"]["out"]},
        **options,
    )


def make_case_system(case: str, output: Path, *flags: Any, name: str = "ours") -> System:
    """Make a system that runs the ETL for one case of a benchmark.

    A run over the whole log fills the cache of compiled kernels. The first rows would not do: in a
    log sorted by time, they have no valid and no test rows.
    """
    system = make_etl_system(name, output, *flags)

    def prepare() -> None:
        system.before()
        run_etl("run", *flags, "--output_path", output)

    return dataclasses.replace(system, case=case, prepare=prepare)


def make_parquet_system(
    name: str, case: str, program: str, output: Path, arguments: Sequence[Any]
) -> System:
    """Make a system that runs a program of ``benchmarks`` with DuckDB and Polars installed.

    Args:
        name: The name of the system.
        case: The case.
        program: The name of the program's file.
        output: The parquet file that the program writes.
        arguments: The arguments of the program.
    """

    def result() -> dict[str, Any]:
        return {"rows": pq.read_metadata(output).num_rows}

    return System(
        name,
        case,
        [str(part) for part in (find_python("events"), HERE.parent / program, *arguments)],
        prepare=lambda: build_environment("events"),
        before=lambda: output.unlink(missing_ok=True),
        result=result,
    )


def make_peer_system(
    name: str, peer: str, log: Path, rows: int, output: Path, *flags: str, **options: Any
) -> System:
    """Make a system that runs a peer's program of this folder, in the peer's environment.

    Args:
        name: The name of the system.
        peer: The peer, a key of the table of environments.
        log: The directory of the log.
        rows: The number of rows of the log.
        output: The output directory.
        flags: More flags of the program.
        options: More fields of :class:`System`.
    """
    program = HERE / f"peer_{peer}.py"
    return System(
        name,
        "",
        [find_python(peer), program, "--input", log, "--output", output, *flags],
        prepare=lambda: build_environment(peer),
        before=lambda: shutil.rmtree(output, ignore_errors=True),
        result=lambda: {"rows": rows},
        **options,
    )
