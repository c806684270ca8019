"""Small raw logs, and what must become of them, computed with plain Python and pandas."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.rows import RawRows, add_missing, make_empty_mask
from tests.workflows.random_specs import Oracle, raw_rows

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


class Reference(Oracle):
    """What the ETL must write of text fields, the slow way."""

    def __init__(self, train: list[list[str]], spec: FeatureSpec = CRITEO) -> None:
        super().__init__(spec, [_parse(train, spec)])

    def table_sizes(self) -> tuple[int, ...]:
        columns = self.spec.categorical
        return tuple(c.reserved_ids + len(self.ids[c.vocabulary_name]) for c in columns)

    def frame(self, rows: list[list[str]]) -> pd.DataFrame:
        """The parquet's columns."""
        frame = pd.DataFrame(self.transform(_parse(rows, self.spec)))
        dtypes = dict.fromkeys(self.spec.categorical_names, np.int32)
        return frame.astype({name: dtypes.get(name, np.float32) for name in frame})


def _parse(rows: list[list[str]], spec: FeatureSpec) -> RawRows:
    """Parse integers and hexadecimal numbers; empty fields are missing."""
    label, *fields = np.array(rows, object).T if rows else np.empty((len(spec.columns), 0), object)
    dense, categorical = fields[: len(spec.dense)], fields[len(spec.dense) :]
    missing = [make_empty_mask(len(columns), len(rows)) for columns in (dense, categorical)]
    for mask, columns in zip(missing, (dense, categorical), strict=True):
        for j, column in enumerate(columns):
            add_missing(mask, j, column == "")
    return raw_rows(
        label.astype(np.uint8),
        [np.array([int(field or "0", 16) for field in column], np.int64) for column in categorical],
        missing[1],
        np.array([[int(field or 0) for field in column] for column in dense], np.int32),
        missing[0],
    )


def read_block(block: Block, spec: FeatureSpec, **options: bool) -> RawRows:
    """Read a block at once."""
    (rows,) = read_block_chunks(block, spec, chunk_bytes=None, **options)
    return rows
