"""Join a log with tables for :mod:`benchmarks.tables`, with DuckDB or Polars.

Run by the interpreter of a separate environment: python tables_peers.py duckdb|polars FOLDER OUTPUT
join|copy
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def join_with_duckdb(folder: Path, output: Path) -> None:
    """Join as of a time with ``ASOF JOIN``; its ``>`` leaves out versions of the same second."""
    import duckdb

    duckdb.sql(f"""
        COPY (
            SELECT log.*, items.price, items.brand, items.category, users.age, users.city, users.job
            FROM read_csv('{folder}/log.csv') log
            ASOF LEFT JOIN read_csv('{folder}/items.csv') items
                ON log.item = items.item AND log.time > items.changed
            LEFT JOIN read_csv('{folder}/users.csv') users ON log.user = users.user
        ) TO '{output}' (FORMAT parquet)
    """)


def copy_with_duckdb(folder: Path, output: Path) -> None:
    """Write only the log."""
    import duckdb

    duckdb.sql(f"COPY (SELECT * FROM read_csv('{folder}/log.csv')) TO '{output}' (FORMAT parquet)")


def join_with_polars(folder: Path, output: Path) -> None:
    """Join as of a time with ``join_asof``, without versions of the same second."""
    import polars as pl

    items = pl.scan_csv(folder / "items.csv").sort("changed")
    users = pl.scan_csv(folder / "users.csv")
    log = pl.scan_csv(folder / "log.csv").sort("time")
    joined = log.join_asof(
        items, left_on="time", right_on="changed", by="item", allow_exact_matches=False
    ).join(users, on="user", how="left")
    joined.sink_parquet(output)


def copy_with_polars(folder: Path, output: Path) -> None:
    """Write only the log."""
    import polars as pl

    pl.scan_csv(folder / "log.csv").sink_parquet(output)


TASKS = {
    ("duckdb", "join"): join_with_duckdb,
    ("duckdb", "copy"): copy_with_duckdb,
    ("polars", "join"): join_with_polars,
    ("polars", "copy"): copy_with_polars,
}

if __name__ == "__main__":
    name, folder, output, task = sys.argv[1:]
    TASKS[name, task](Path(folder), Path(output))
    print(json.dumps({"bytes": Path(output).stat().st_size}))
