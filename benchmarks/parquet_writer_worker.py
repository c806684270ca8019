"""Write a parquet file with one writer, and read it back: a process of :mod:`.parquet_writer`.

The arguments are the writer, a file whose rows are written, and the file to write. The times are
printed as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.etl.units.part_files import ROW_GROUP_ROWS, PartWriter

#: The rows that are written first without being measured, to load the compiled kernels.
_WARM_UP_ROWS = 1000


def main() -> None:
    """Run the writer that the command line names."""
    name = sys.argv[1]
    source = Path(sys.argv[2])
    path = Path(sys.argv[3])
    write = WRITERS[name]
    table = pq.read_table(source)
    write(table.slice(0, _WARM_UP_ROWS), path)
    _, write_times = _measure(lambda: write(table, path))
    read, read_times = _measure(lambda: pq.read_table(path, use_threads=False))
    if not read.equals(table):
        raise ClickLogError(f"{name}: {path} does not have the rows of {source}")
    times = {f"write_{key}": value for key, value in write_times.items()}
    times |= {f"read_{key}": value for key, value in read_times.items()}
    print(json.dumps({"rows": len(table), "mb": path.stat().st_size / 1e6, **times}))
    path.unlink()


def _measure(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Call a function; return its result, and the wall time and CPU time of all threads."""
    wall = time.perf_counter()
    cpu = time.process_time()
    result = work()
    return result, {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def _write_ours(table: pa.Table, path: Path) -> None:
    with PartWriter(path) as part:
        part.write(table)


def _write_arrow(table: pa.Table, path: Path) -> None:
    """Write like the ETL: uncompressed, in the same row groups, with page checksums."""
    pq.write_table(
        table,
        path,
        compression="none",
        row_group_size=ROW_GROUP_ROWS,
        write_page_checksum=True,
    )


def _write_arrow_snappy(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS)


WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {
    "ours": _write_ours,
    "arrow": _write_arrow,
    "arrow, snappy": _write_arrow_snappy,
}

if __name__ == "__main__":
    main()
