"""Small raw logs, and what must become of them, computed with plain Python and pandas."""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec

CRITEO = load_spec()
#: Of the days of most logs.
ROWS = [60, 50, 41]
#: By the ending of a compressed file's name.
COMPRESS = {
    "gz": lambda data: gzip.compress(data, 1),
    "bz2": lambda data: bz2.compress(data, 1),
    "xz": lambda data: lzma.compress(data, preset=0),
    "zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


def random_rows(rows: int, seed: int, spec: FeatureSpec = CRITEO) -> list[list[str]]:
    """Fields of random rows: missing values, negative counts, few and many categories."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(rows):
        dense = [
            "" if rng.random() < 0.2 else str(int(rng.geometric(0.02)) - 4) for _ in spec.dense
        ]
        draws = [int(rng.zipf(1.5)) % (3 + 7 * j) for j in range(len(spec.categorical))]
        categorical = [
            "" if rng.random() < 0.1 else f"{(draw * 0x1F3D5B79 + j) % 2**32:08x}"
            for j, draw in enumerate(draws)
        ]
        result.append([str(int(rng.random() < 0.3)), *dense, *categorical])
    return result


def write_day(path: Path, rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(rows))


def text_of(rows: list[list[str]]) -> str:
    return "".join("\t".join(row) + "\n" for row in rows)


def write_log(directory: Path, rows_per_day: list[int], seed: int = 0) -> list[list[list[str]]]:
    """``day_0 …`` with so many rows; returns the fields of all days."""
    days = [random_rows(rows, seed * 1000 + day) for day, rows in enumerate(rows_per_day)]
    for day, rows in enumerate(days):
        write_day(directory / f"day_{day}", rows)
    return days


def pack(path: Path, ending: str = "gz") -> Path:
    """Replace a file by a compressed one."""
    packed = path.with_name(f"{path.name}.{ending}")
    packed.write_bytes(COMPRESS[ending](path.read_bytes()))
    path.unlink()
    return packed


class Reference:
    """What the ETL must write, the slow way: counters, sorted lists and float64 sums."""

    def __init__(self, train: list[list[str]], spec: FeatureSpec = CRITEO) -> None:
        self.spec = spec
        dense_end = 1 + len(spec.dense)
        self.ids = [
            self._vocabulary([row[dense_end + j] for row in train], column)
            for j, column in enumerate(spec.categorical)
        ]
        values = [[self._dense(row[1 + j]) for row in train] for j in range(len(spec.dense))]
        self.mean = [math.fsum(column) / len(column) for column in values]
        self.std = [
            math.sqrt(math.fsum((v - m) ** 2 for v in column) / (len(column) - 1))
            for column, m in zip(values, self.mean, strict=True)
        ]

    @staticmethod
    def _vocabulary(fields: list[str], column) -> dict[int, int]:
        counts = Counter(int(field, 16) for field in fields if field)
        kept = sorted(counts, key=lambda value: (-counts[value], value))
        kept = [value for value in kept if counts[value] >= column.freq_threshold]
        if column.max_table_size:
            kept = kept[: column.max_table_size - column.reserved_ids]
        return {value: column.reserved_ids + i for i, value in enumerate(kept)}

    def _dense(self, field: str) -> float:
        value = float(field) if field else 0.0
        if self.spec.dense_transform == "normalize":
            return value
        if self.spec.dense_transform == "log_plus_2":
            return math.log(max(value, -1.0) + 2.0)
        return math.log(max(value, -2.0) + 3.0)

    def table_sizes(self) -> tuple[int, ...]:
        return tuple(
            column.reserved_ids + len(ids)
            for column, ids in zip(self.spec.categorical, self.ids, strict=True)
        )

    def transform(self, rows: list[list[str]]) -> pd.DataFrame:
        """The parquet's columns (one out-of-vocabulary id: no ``num_buckets`` here)."""
        spec, columns = self.spec, {}
        columns[spec.label] = np.array([row[0] for row in rows], np.float32)
        for j, name in enumerate(spec.dense_names):
            values = np.array([self._dense(row[1 + j]) for row in rows])
            if spec.dense_transform not in ("log", "log_plus_2"):
                values = (values - self.mean[j]) / (self.std[j] or 1.0)
            columns[name] = values.astype(np.float32)
        for j, name in enumerate(spec.categorical_names):
            fields = [row[1 + len(spec.dense) + j] for row in rows]
            columns[name] = np.array(
                [self.ids[j].get(int(f, 16), 2) if f else 1 for f in fields], np.int32
            )
        return pd.DataFrame(columns)
