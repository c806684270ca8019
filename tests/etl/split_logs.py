"""Logs whose rows are split by share, column, time or values, and in which rows have numbers."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pandas as pd

from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.split import BY_DAYS, Split
from nvt_torchrec.formats.splits import SPLITS
from tests.etl.runs import read_split

#: Shares, of which only a run over all rows knows the cuts.
SHARES_OF_TIME = Split("time", column="when", time_format="epoch_s", valid=0.1, test=0.2)
#: Forty users, as the values of a split.
USERS = tuple(f"user é{number}" for number in range(40))
#: Splits of which each row knows by itself where it goes.
SPLITS_OF_ROWS = {
    "share": Split("share", valid=0.2, test=0.1, seed=7),
    "column": Split("column", column="user", valid=0.2, test=0.2, seed=1),
    "time": dataclasses.replace(
        SHARES_OF_TIME, valid=0, test=0, valid_from="1970-01-01 00:10", test_from="1970-01-01 00:12"
    ),
    "values": Split(
        "values",
        column="user",
        train_values=USERS[8:],
        valid_values=USERS[:5],
        test_values=USERS[5:8],
    ),
    "values and a share": Split(
        "values", column="user", train_values=USERS[8:], test_values=USERS[:8], valid=0.2, seed=3
    ),
}
NAMES = ("row", "label", "item", "rare", "price", "user", "when", "other")


def spec_with(split: Split = BY_DAYS, format: str = "csv") -> FeatureSpec:
    """The columns of :func:`write`."""
    return FeatureSpec(
        "label",
        (DenseColumn("row", transform="log"), DenseColumn("price")),
        (
            CategoricalColumn("item", raw="string"),
            CategoricalColumn("rare", raw="string", freq_threshold=3),
        ),
        input=InputFormat(format, header=True if format == "csv" else None),
        split=split,
    )


def write(
    raw: Path, rows: dict[int, int], *, users: int = 30, later: int = 0, width: int = 0,
    format: str = "csv",
) -> dict[int, dict[str, str]]:  # fmt: skip
    """Write ``day_<number>.csv`` with so many rows; return the fields of each by its number.

    Row ``i`` of a day has the number 1000 × day + i. Times of all days are the same, as in a log
    whose files are shards, unless ``later``.
    """
    raw.mkdir(parents=True, exist_ok=True)
    found = {}
    for day, count in rows.items():
        rng = random.Random(day)
        lines = [",".join(NAMES)]
        for row in range(1000 * day, 1000 * day + count):
            values = (
                row, row % 3 % 2, f"i{rng.randrange(6)}-{day * rng.randrange(2)}",
                f"r{rng.randrange(9)}", rng.randrange(-9, 99), f"user é{rng.randrange(users)}",
                rng.randrange(1000) + later, "x" * width,
            )  # fmt: skip
            found[row] = dict(zip(NAMES, map(str, values), strict=True))
            lines.append(",".join(map(str, values)))
        path = raw / f"day_{day}.csv"
        path.write_text("\n".join(lines) + "\n")
        if format == "parquet":
            frame = pd.read_csv(path)
            frame.to_parquet(path.with_suffix(".parquet"), row_group_size=17, index=False)
            path.unlink()
    return found


def numbers_of(output: Path) -> dict[str, list[int]]:
    """The numbers of the rows of each split, in their order."""
    return {split: numbers(read_split(output, split)["row"]) for split in SPLITS}


def numbers(encoded) -> list[int]:
    """The numbers that values of the column ``row`` stand for."""
    return np.rint(np.exp(np.asarray(encoded)) - 3).astype(int).tolist()
