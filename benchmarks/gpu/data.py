"""What the parts work on: a raw log, parquet of MLPerf's table sizes, and TorchRec's arrays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.data import FILE_ROWS, criteo_schema, make_once, write_rows
from benchmarks.gpu.worker import GpuSettings, Result
from nvt_torchrec.clicklog.synthetic.log import SyntheticSettings, synthesize
from nvt_torchrec.clicklog.synthetic.model import MLPERF_CARDINALITIES

LOG_DAYS = 3
#: Names of each training file, so that runs are long: a GPU takes millions of rows a second.
NAMES = 8


def make_all(args: GpuSettings, device: object) -> Iterator[Result]:
    """Make the log, then the parquet, on the host."""
    for path in (ensure_log(args), ensure_parquet(args)):
        yield {"system": path.name, "case": "data"}


def ensure_log(args: GpuSettings) -> Path:
    """Return a synthetic log of ``log_rows`` rows in :data:`LOG_DAYS` days, which is made once.

    The days before the last are there :data:`NAMES` times, so that a run is long enough for a GPU.
    """
    root = args.data / f"log-{args.log_rows}x{NAMES}"

    def make() -> None:
        each = args.log_rows // LOG_DAYS
        synthesize(root, SyntheticSettings(LOG_DAYS, each, cardinality_scale=0.05))
        training = LOG_DAYS - 1
        os.rename(root / f"day_{training}", root / f"day_{NAMES * training}")
        for day in range(training, NAMES * training):
            _link(root / f"day_{day % training}", root / f"day_{day}")

    make_once(root, f"{args.log_rows} rows of a log, {NAMES} times", make)
    return root


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy(source, target)


def ensure_parquet(args: GpuSettings) -> Path:
    """Return ``…/split`` with train, valid and test as the ETL writes them; made once.

    The tables are MLPerf's, none larger than ``max_table_rows``. The training set is :data:`NAMES`
    times ``rows`` rows; ``…/npy`` has them in TorchRec's binary layout. The valid and test sets are
    small: nothing is measured on them.
    """
    root = args.data / f"parquet-{args.rows}x{NAMES}-{args.max_table_rows}"
    split = root / "split"

    def make() -> None:
        schema = criteo_schema([min(n, args.max_table_rows) for n in MLPERF_CARDINALITIES])
        files = write_rows(split / "train", schema, args.rows, npy=root / "npy")
        for name in ("valid", "test"):
            write_rows(split / name, schema, 1000)
        for number in range(len(files), NAMES * len(files)):
            _link(files[number % len(files)], files[0].with_name(f"part.{number}.parquet"))
        schema.write(split)

    make_once(root, f"{args.rows} rows of parquet, {NAMES} times", make)
    return split


def training_files(split: Path, rows: int) -> list[Path]:
    """Return the training files, each once."""
    return [split / "train" / f"part.{i}.parquet" for i in range(-(-rows // FILE_ROWS))]
