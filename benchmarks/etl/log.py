"""The raw log of the benchmark: synthetic, and with as long a tail of rare values as a real one.

``etl synthesize`` draws values by Zipf's law with the exponent 1.5: few are rare, and two million
rows hold some ten thousand values of a column. Of a real log's largest columns a good part of the
rows hold values that are seen once or twice, which is what vocabularies cost. So a share of the
rows get another value in these columns, drawn evenly out of two million.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from benchmarks.data import make_once
from nvt_torchrec.clicklog.synthetic.log import SyntheticSettings, synthesize
from nvt_torchrec.formats.spec.toml_file import load_spec

DAYS = 8
#: The columns with millions of values in MLPerf's list of cardinalities.
_LARGEST = ("cat_0", "cat_9", "cat_10", "cat_19", "cat_20", "cat_21")
_RARE_VALUES = 2_000_000


def make_log(path: Path, rows: int, cardinality_scale: float, rare: float) -> None:
    """Make ``day_0`` … in ``path``, unless they exist.

    Args:
        path: The directory of the log.
        rows: The rows of all days together.
        cardinality_scale: That of ``etl synthesize``.
        rare: The share of the rows that get a rare value, in each of the largest columns.
    """
    each = rows // DAYS

    def make() -> None:
        synthesize(path, SyntheticSettings(DAYS, each, cardinality_scale=cardinality_scale))
        fields = [load_spec().columns.index(name) for name in _LARGEST]
        generator = np.random.default_rng(1)
        values = generator.integers(0, 2**32, (len(fields), _RARE_VALUES), np.uint32)
        for day in range(DAYS):
            _add_rare(path / f"day_{day}", fields, values, rare, seed=day)

    make_once(path, f"a log of {each * DAYS} rows", make)


def _add_rare(path: Path, fields: list[int], values: np.ndarray, rare: float, seed: int) -> None:
    lines = path.read_text().splitlines()
    generator = np.random.default_rng(seed)
    chosen = generator.random((len(lines), len(fields))) < rare
    drawn = generator.integers(0, values.shape[1], chosen.shape)
    with open(path, "w") as out:
        for line, replaced, at in zip(lines, chosen, drawn, strict=True):
            row = line.split("\t")
            for i in np.flatnonzero(replaced):
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
