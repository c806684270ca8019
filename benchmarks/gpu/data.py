"""What the parts work on: a raw log, parquet of MLPerf's table sizes, and TorchRec's arrays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.gpu.measure import Result
from benchmarks.gpu.worker import GpuSettings
from benchmarks.loader.data import ROW_GROUP_ROWS, WRITER, make_rows
from nvt_torchrec.clicklog.synthetic.log import SyntheticSettings, synthesize
from nvt_torchrec.clicklog.synthetic.model import MLPERF_CARDINALITIES
from nvt_torchrec.formats.schema import TableSchema

LOG_DAYS, FILE_ROWS = 3, 1_000_000
#: Names of each training file, so that runs are long: a GPU takes millions of rows a second.
NAMES = 8


def make_all(args: GpuSettings, device: object) -> Iterator[Result]:
    """Make the log, then the parquet, on the host."""
    ensure_log(args.data, args.log_rows)
    yield {"system": "log", "case": "data"}
    ensure_parquet(args.data, args.rows, args.max_table_rows)
    yield {"system": "parquet", "case": "data"}


def ensure_log(root: Path, rows: int) -> Path:
    """A synthetic log, made once: ``rows`` rows in :data:`LOG_DAYS` days.

    The days before the last are there :data:`NAMES` times, so that a run is long enough for a GPU.
    """
    path = root / f"log-{rows}x{NAMES}"
    if not (path / "done").is_file():
        shutil.rmtree(path, ignore_errors=True)
        each = rows // LOG_DAYS
        synthesize(path, SyntheticSettings(LOG_DAYS, each, cardinality_scale=0.05))
        training = LOG_DAYS - 1
        days = NAMES * training
        os.rename(path / f"day_{training}", path / f"day_{days}")
        for day in range(training, days):
            _link(path / f"day_{day % training}", path / f"day_{day}")
        (path / "done").touch()
    return path


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy(source, target)


def schema_of(max_table_rows: int) -> TableSchema:
    """MLPerf's 26 tables (at most 40 M rows), none larger than ``max_table_rows``."""
    sizes = tuple(min(count, max_table_rows) for count in MLPERF_CARDINALITIES)
    dense = tuple(f"int_{i}" for i in range(13))
    return TableSchema("label", dense, tuple(f"cat_{i}" for i in range(len(sizes))), sizes)


def ensure_parquet(root: Path, rows: int, max_table_rows: int) -> Path:
    """``…/split`` with train, valid and test as the ETL writes them; made once.

    The training set is :data:`NAMES` times ``rows`` rows. The valid and test sets are small:
    nothing is measured on them. ``…/npy`` has the training rows in TorchRec's binary layout.
    """
    base = root / f"parquet-{rows}x{NAMES}-{max_table_rows}"
    if (base / "done").is_file():
        return base / "split"
    shutil.rmtree(base, ignore_errors=True)
    schema = schema_of(max_table_rows)
    (base / "npy").mkdir(parents=True)
    for split, count in (("train", rows), ("valid", 1000), ("test", 1000)):
        directory = base / "split" / split
        directory.mkdir(parents=True)
        schema.write(directory)
        for number, first in enumerate(range(0, count, FILE_ROWS)):
            table = make_rows(schema, min(FILE_ROWS, count - first), number, np.int32)
            path = directory / f"part.{number}.parquet"
            pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS, **WRITER)
            if split == "train":
                _to_npy(table, schema, base / "npy", number)
    files = training_files(base / "split", rows)
    for number in range(len(files), NAMES * len(files)):
        _link(files[number % len(files)], files[0].with_name(f"part.{number}.parquet"))
    schema.write(base / "split")
    (base / "done").touch()
    return base / "split"


def training_files(split: Path, rows: int) -> list[Path]:
    """The training files, each once."""
    return [split / "train" / f"part.{i}.parquet" for i in range(-(-rows // FILE_ROWS))]


def _to_npy(table, schema: TableSchema, target: Path, number: int) -> None:
    for kind, names, dtype in (
        ("dense", schema.dense, np.float32),
        ("sparse", schema.categorical, np.int32),
        ("labels", (schema.label,), np.int32),
    ):
        columns = [np.asarray(table[name]) for name in names]
        np.save(target / f"{number}_{kind}.npy", np.stack(columns, axis=1).astype(dtype))
