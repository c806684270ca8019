"""Compute the aggregates and histories of :mod:`benchmarks.events` with DuckDB or Polars.

Each output row contains its whole history. Only events strictly before a row count: rows of the
same second do not see each other. With a window of 0 seconds, there are no aggregates and no
histories. This program imports nothing of ours.
"""

import argparse
import json
import os

COPY = "COPY ({query}) TO '{output}' (FORMAT parquet, COMPRESSION uncompressed)"
PLAIN = "SELECT * EXCLUDE (time, \"user\") FROM read_csv('{log}')"
EVENTS = """
SELECT * EXCLUDE (time, "user"),
    count(*) OVER users AS user_count, coalesce(sum(label) OVER users, 0) AS user_clicks,
    time - max(time) OVER users AS user_since,
    count(*) OVER items AS item_count, coalesce(sum(label) OVER items, 0) AS item_clicks,
    (list(item) OVER users)[-50:] AS recent
FROM read_csv('{log}')
WINDOW users AS (PARTITION BY "user" ORDER BY time
                 RANGE BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
       items AS (PARTITION BY item ORDER BY time
                 RANGE BETWEEN {window} PRECEDING AND 1 PRECEDING)
"""


def add_with_duckdb(log: str, output: str, window: int) -> None:
    """Add aggregates and histories by window functions over ranges of time."""
    import duckdb

    query = (EVENTS if window else PLAIN).format(log=log, window=window)
    duckdb.sql(COPY.format(query=query, output=output))


def add_with_polars(log: str, output: str, window: int) -> None:
    """Add aggregates and histories by rolling groups, whose windows exclude the row's time."""
    import polars as pl

    if not window:
        plain = pl.read_csv(log).drop("time", "user")
        plain.write_parquet(output, compression="uncompressed")
        return
    rows = pl.read_csv(log).with_row_index("row").sort("time", maintain_order=True)

    def roll(key: str, period: int, **values: pl.Expr) -> pl.DataFrame:
        rolled = rows.rolling("time", period=f"{period}i", closed="left", group_by=key)
        before = rolled.agg(pl.len().alias(f"{key}_count"), **values)
        # `rolling` returns its groups in this order.
        order = rows.sort([key, "time"], maintain_order=True)["row"]
        return before.drop(key, "time").with_columns(order.alias("row"))

    users = roll(
        "user", 2**40, user_clicks=pl.col("label").sum(), user_last=pl.col("time").max(),
        recent=pl.col("item").tail(50),
    )  # fmt: skip
    items = roll("item", window, item_clicks=pl.col("label").sum())
    both = rows.join(users, on="row").join(items, on="row").sort("row")
    both = both.with_columns(user_since=pl.col("time") - pl.col("user_last"))
    both.drop("row", "time", "user", "user_last").write_parquet(output, compression="uncompressed")


def main() -> None:
    """Read a log, write parquet, print its size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=("duckdb", "polars"))
    parser.add_argument("log")
    parser.add_argument("output")
    parser.add_argument("window", type=int)
    arguments = parser.parse_args()
    add = {"duckdb": add_with_duckdb, "polars": add_with_polars}[arguments.peer]
    add(arguments.log, arguments.output, arguments.window)
    print(json.dumps({"bytes": os.path.getsize(arguments.output)}))


if __name__ == "__main__":
    main()
