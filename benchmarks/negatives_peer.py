"""What Polars does for :mod:`benchmarks.negatives`, in an environment of its own.

python negatives_peer.py LOG OUTPUT PER_POSITIVE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl


def draw(log: pl.DataFrame, per_positive: int) -> pl.DataFrame:
    """Return a log with rows of items that their users do not have."""
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
        rows = draw(rows, int(per_positive))
    rows.write_parquet(output)
    print(json.dumps({"bytes": Path(output).stat().st_size}))
