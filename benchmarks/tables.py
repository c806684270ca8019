"""Compare joins of a log with tables, one of them as of a time, with DuckDB and Polars.

The peers only join the same columns and write them as parquet; ours is the whole ETL, which also
fits and encodes. Each system also runs without tables; then the peers just write the columns that
they read. A note below the table gives the time that the tables add. With ``--vector_width``, ours
has one more case, in which each user has a vector of random numbers.

    python -m benchmarks.tables --rows 2000000
    python -m benchmarks.tables --rows 600000 --users 1000000 --vector_width 128 --systems ours
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.data import make_once
from benchmarks.etl.systems import CASE_METRICS, make_case_system, make_parquet_system
from benchmarks.harness import System, Table, describe_added, run_benchmark
from benchmarks.process import BUILD
from benchmarks.raw_log import SECONDS, draw_labels, draw_log, draw_prices, write_csv
from nvt_torchrec.base.command_line import Settings, flag

TABLES = "tables"
PLAIN = "no tables"
VECTORS = "vectors"
PEERS = ("duckdb", "polars")

#: The number of versions of each item.
VERSIONS = 10
#: The spec without tables.
_SPEC = """[input]
format = "csv"
[split]
by = "time"
column = "time"
time_format = "epoch_s"
valid_from = "1970-01-28"
test_from = "1970-01-29"
[[categorical]]
names = ["user", "item"]
raw = "int"
"""
#: Additional blocks of the spec with tables.
_JOINED = """[[table]]
name = "items"
path = "items.csv"
key = "item"
valid_from = "changed"
time_format = "epoch_s"
[[table]]
name = "users"
path = "users.csv"
key = "user"
[[dense]]
names = "price"
raw = "float"
table = "items"
[[dense]]
names = "age"
table = "users"
[[categorical]]
names = ["brand", "category"]
raw = "string"
table = "items"
[[categorical]]
names = ["city", "job"]
raw = "string"
table = "users"
"""
#: Additional blocks of the spec with vectors.
_VECTOR = """[[table]]
name = "texts"
path = "texts.parquet"
key = "user"
[[vector]]
name = "text"
table = "texts"
width = {width}
"""
#: The number of vectors that are drawn and written at once.
_CHUNK_VECTORS = 50_000


@dataclasses.dataclass(frozen=True)
class TablesSettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("rows of the log", 2_000_000, minimum=10_000)
    items: int = flag(f"items, with {VERSIONS} versions each", 100_000, minimum=100)
    users: int = flag("users", 200_000, minimum=100)
    vector_width: int = flag("width of each user's vector; 0 for no vectors", 0, minimum=0)
    systems: tuple[str, ...] = flag(
        "systems to measure", ("ours", *PEERS), choices=("ours", *PEERS)
    )
    repeats: int = flag("runs of each system", 3, minimum=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    return run_benchmark("tables", __doc__, TablesSettings, _run, argv)


def _run(settings: TablesSettings) -> int:
    rows = settings.rows
    items = settings.items
    users = settings.users
    width = settings.vector_width
    root = BUILD / f"tables-{rows}-{items}-{users}-{width}"
    log = f"{rows:,} rows, {items:,} items of {VERSIONS} versions, {users:,} users"
    cases = [TABLES, PLAIN]
    if width:
        cases.insert(0, VECTORS)
        log += f", vectors of {width} float32"

    def make() -> None:
        _make_log(root, rows, items, users)
        if width:
            _add_vectors(root, users, width)

    make_once(root, f"a log with tables of {log}", make)
    base = "polars" if "polars" in settings.systems else "ours"
    table = Table("tables", f"Tables: {log}", CASE_METRICS, base=base)
    systems = []
    for name in settings.systems:
        if name == "ours":
            systems += [_make_ours(root, case) for case in cases]
        else:
            systems += [_make_peer(root, name, case) for case in (TABLES, PLAIN)]
    table.measure(systems, repeats=settings.repeats)
    table.notes += describe_added(table, TABLES, PLAIN)
    if width and "ours" in settings.systems:
        table.notes += describe_added(table, VECTORS, TABLES)
    return table.finish()


def _make_log(root: Path, rows: int, items: int, users: int) -> None:
    """Write a log sorted by time, and tables of its items and users."""
    random = np.random.default_rng(0)
    log = draw_log(random, rows, users, items)
    log["item"] -= 1
    log["label"] = draw_labels(random, rows)
    write_csv(log, root / "log.csv")
    versions = items * VERSIONS
    texts = np.array([f"text number {i}" for i in range(5_000)])
    changed = random.permutation(SECONDS)[:VERSIONS]
    changed[0] = 0
    item_columns = {
        "item": np.repeat(np.arange(items), VERSIONS),
        "changed": np.tile(np.sort(changed), items),
        "price": draw_prices(random, versions),
        "brand": texts[random.integers(0, 5_000, versions)],
        "category": texts[random.integers(0, 50, versions)],
    }
    write_csv(item_columns, root / "items.csv")
    user_columns = {
        "user": np.arange(users),
        "age": random.integers(15, 90, users),
        "city": texts[random.integers(0, 3_000, users)],
        "job": texts[random.integers(0, 100, users)],
    }
    write_csv(user_columns, root / "users.csv")
    (root / "tables.toml").write_text(_SPEC + _JOINED)
    (root / "plain.toml").write_text(_SPEC)


def _add_vectors(root: Path, users: int, width: int) -> None:
    """Write a vector for each user, one chunk at a time."""
    random = np.random.default_rng(1)
    schema = pa.schema({"user": pa.int64(), "text": pa.list_(pa.float32(), width)})
    with pq.ParquetWriter(root / "texts.parquet", schema) as writer:
        for begin in range(0, users, _CHUNK_VECTORS):
            keys = np.arange(begin, min(begin + _CHUNK_VECTORS, users))
            numbers = random.standard_normal(len(keys) * width, np.float32)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(numbers), width)
            writer.write_table(pa.table([pa.array(keys), lists], schema=schema))
    (root / "vectors.toml").write_text(_SPEC + _JOINED + _VECTOR.format(width=width))


def _make_ours(root: Path, case: str) -> System:
    """Return the ETL with tables and vectors, with tables, or without either."""
    spec = "plain" if case == PLAIN else case
    flags = "--spec", root / f"{spec}.toml", "--input_path", root / "log.csv"
    return make_case_system(case, root / spec, *flags)


def _make_peer(root: Path, name: str, case: str) -> System:
    """Return DuckDB or Polars, with or without tables."""
    output = root / f"{name}.parquet"
    task = "join" if case == TABLES else "copy"
    return make_parquet_system(name, case, "tables_peers.py", output, [name, root, output, task])


if __name__ == "__main__":
    sys.exit(main())
