"""Draw negatives for :mod:`benchmarks.negatives` with Polars.

Run by the interpreter of a separate environment: python negatives_peer.py LOG OUTPUT PER_POSITIVE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl


def add_negatives(log: pl.DataFrame, per_positive: int) -> pl.DataFrame:
    """Add rows with random items that their users do not have."""
    items = log["item"].unique().sort()
    repeated = pl.concat([log] * per_positive)
    drawn = items.sample(len(repeated), with_replacement=True, seed=1)
    negatives = repeated.with_columns(drawn.alias("item"), pl.lit(0, pl.Int64).alias("liked"))
    negatives = negatives.join(log, on=["user", "item"], how="anti")
    return pl.concat([log, negatives]).sort("time")


if __name__ == "__main__":
    path, output, per_positive = sys.argv[1:]
    rows = pl.read_csv(path)
    if int(per_positive):
        rows = add_negatives(rows, int(per_positive))
    rows.write_parquet(output)
    print(json.dumps({"bytes": Path(output).stat().st_size}))
