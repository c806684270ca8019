"""The raw log of the benchmark: synthetic, and with as long a tail of rare values as a real one.

``etl synthesize`` draws values by Zipf's law with the exponent 1.5: few are rare, and two million
rows hold some ten thousand values of a column. Of a real log's largest columns a good part of the
rows hold values that are seen once or twice, which is what vocabularies cost. So a share of the
rows get another value in these columns, drawn evenly out of two million.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.harness import ROOT
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import atomic_path, read_json, write_json
from nvt_torchrec.formats.spec.toml_file import load_spec

DAYS = 8
#: The columns with millions of values in MLPerf's list of cardinalities.
_LARGEST = ("cat_0", "cat_9", "cat_10", "cat_19", "cat_20", "cat_21")
_RARE_VALUES = 2_000_000
SUMMARY_FILE = "log.json"


def make_log(path: Path, rows: int, cardinality_scale: float, rare: float) -> None:
    """Make ``day_0`` … in ``path``, unless they exist.

    Args:
        path: of the log.
        rows: in all days together.
        cardinality_scale: see ``etl synthesize``.
        rare: share of the rows that get a rare value, in each of the largest columns.
    """
    if (path / SUMMARY_FILE).is_file():
        return
    shutil.rmtree(path, ignore_errors=True)
    plain = path.with_name(f"{path.name}.plain")
    shutil.rmtree(plain, ignore_errors=True)
    command = [sys.executable, "-m", "etl", "synthesize", "--output_path", plain]
    command += ["--days", str(DAYS), "--rows_per_day", str(rows // DAYS)]
    command += ["--cardinality_scale", str(cardinality_scale)]
    subprocess.run(command, check=True, cwd=ROOT)
    fields = [load_spec().columns.index(name) for name in _LARGEST]
    values = np.random.default_rng(1).integers(0, 2**32, (len(fields), _RARE_VALUES), np.uint32)
    for day in range(DAYS):
        _add_rare(plain / f"day_{day}", path / f"day_{day}", fields, values, rare, seed=day)
    shutil.rmtree(plain)
    write_json(path / SUMMARY_FILE, {"rows": rows // DAYS * DAYS, "rare": rare})


def _add_rare(
    source: Path, target: Path, fields: list[int], values: np.ndarray, rare: float, seed: int
) -> None:
    lines = source.read_text().splitlines()
    generator = np.random.default_rng(seed)
    chosen = generator.random((len(lines), len(fields))) < rare
    drawn = generator.integers(0, values.shape[1], chosen.shape)
    with atomic_path(target) as temporary, open(temporary, "w") as out:
        for line, own, at in zip(lines, chosen, drawn, strict=True):
            row = line.split("\t")
            for i in np.flatnonzero(own):
                row[fields[i]] = f"{values[i, at[i]]:08x}"
            out.write("\t".join(row) + "\n")


def repeat_head(source: Path, target: Path, head_bytes: int, times: int) -> None:
    """Make a log whose days repeat the first lines of those of ``source``.

    Whatever ``times``, it has the same values, and so the same vocabularies.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for day in range(DAYS):
        with open(source / f"day_{day}", "rb") as file:
            head = file.read(head_bytes)
        head = head[: head.rindex(b"\n") + 1]
        with open(target / f"day_{day}", "wb") as out:
            for _ in range(times):
                out.write(head)


def rows_of(path: Path) -> int:
    """Return the rows of a log made by :func:`make_log`, or by ``etl synthesize``.

    Raises:
        BadInputError: there is none.
    """
    for name in (SUMMARY_FILE, "synthetic.json"):
        if (path / name).is_file():
            return read_json(path / name, "a synthetic log")["rows"]
    raise BadInputError(f"{path}: no {SUMMARY_FILE}", "leave --input out: the log is made then")
