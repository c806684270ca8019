"""The same aggregates and histories with DuckDB and Polars, as fat rows; imports nothing of ours.

Strictly before: rows of the same second do not count for each other. With a window of 0 seconds,
neither aggregates nor histories.
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


def add_by_duckdb(log: str, output: str, window: int) -> None:
    """Add aggregates and histories by window functions with ranges of times."""
    import duckdb

    query = (EVENTS if window else PLAIN).format(log=log, window=window)
    duckdb.sql(COPY.format(query=query, output=output))


def add_by_polars(log: str, output: str, window: int) -> None:
    """Add aggregates and histories by rolling groups that are open at the row's time."""
    import polars as pl

    if not window:
        plain = pl.read_csv(log).drop("time", "user")
        plain.write_parquet(output, compression="uncompressed")
        return
    rows = pl.read_csv(log).with_row_index("row").sort("time", maintain_order=True)

    def roll(key: str, period: int, **values: pl.Expr) -> pl.DataFrame:
        rolled = rows.rolling("time", period=f"{period}i", closed="left", group_by=key)
        before = rolled.agg(pl.len().alias(f"{key}_count"), **values)
        order = rows.sort([key, "time"], maintain_order=True)["row"]  # as rolling returns them
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
    """Read a log, write parquet, print its checksums."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=("duckdb", "polars"))
    parser.add_argument("log")
    parser.add_argument("output")
    parser.add_argument("window", type=int)
    arguments = parser.parse_args()
    make = {"duckdb": add_by_duckdb, "polars": add_by_polars}[arguments.peer]
    make(arguments.log, arguments.output, arguments.window)
    print(json.dumps({"bytes": os.path.getsize(arguments.output)}))


if __name__ == "__main__":
    main()
