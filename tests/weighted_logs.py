"""Small logs with two labels and a weight, as CSV, and the spec that reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec

SPEC = """
[input]
format = "csv"

[[label]]
name = "liked"
from = "rating"
threshold = 4

[[label]]
name = "bought"

[weight]
name = "w"

[[dense]]
names = "age"
raw = "float"

[[categorical]]
names = ["site", "user"]
raw = "string"
"""


def write_weighted_log(directory: Path, rows: list[int]) -> tuple[FeatureSpec, list[pd.DataFrame]]:
    """Write ``raw/day_0.csv …`` with so many rows, and the spec; return it and the days."""
    (directory / "spec.toml").write_text(SPEC)
    (directory / "raw").mkdir()
    days = []
    for day, count in enumerate(rows):
        rng = np.random.default_rng(day)
        site = rng.integers(0, 9, count)
        frame = pd.DataFrame(
            {
                "age": rng.integers(0, 90, count) / 2,
                "w": rng.choice([0.0, 0.125, 1.0, 6.5], count),
                "site": [f"s{number}" for number in site],
                "rating": rng.integers(1, 6, count),
                "user": [f"u{number}" for number in rng.integers(0, 30, count)],
                "bought": (rng.random(count) < 0.1 + 0.08 * site).astype(int),
            }
        )
        frame.to_csv(directory / "raw" / f"day_{day}.csv", index=False)
        days.append(frame)
    return load_spec(directory / "spec.toml"), days
