"""A log of plays, a row for each, sorted by user, and its splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from tests.etl.runs import etl_run

SPEC = """
[input]
format = "csv"
[label]
name = "played"
[split]
{split}
[[dense]]
names = "length"
raw = "float"
[[categorical]]
names = ["user", "item"]
raw = "int"
"""
SHARES = "valid = 0.1\ntest = 0.1"
SHARE = f'by = "share"\n{SHARES}'
TIME = f'by = "time"\ncolumn = "at"\ntime_format = "epoch_s"\n{SHARES}'
DAYS = 'by = "days"'


def write_plays(
    directory: Path,
    split: str,
    *flags: str,
    rows: int = 3_000,
    users: int = 60,
    items: int = 40,
    crossed: float = 0.0,
) -> Path:
    """Write the splits of a log of plays, sorted by user; users and items have effects.

    ``crossed`` scales the products of two vectors of user and item beside them.
    """
    rng = np.random.default_rng(0)
    user = np.sort(rng.integers(0, users, rows))
    item = rng.integers(0, items, rows)
    frame = {"user": user, "item": item, "at": 10**9 + user * 1000, "length": rng.random(rows)}
    logits = rng.normal(0, 2, users)[user] + rng.normal(0, 1, items)[item]
    of_users, of_items = rng.normal(0, 1, (users, 2)), rng.normal(0, 1, (items, 2))
    logits += crossed * (of_users[user] * of_items[item]).sum(1)
    played = rng.random(rows) < 1 / (1 + np.exp(-logits))
    pd.DataFrame({**frame, "played": played.astype(int)}).to_csv(directory / "log.csv", index=False)
    (directory / "spec.toml").write_text(SPEC.format(split=split))
    assert not etl_run(
        directory / "log.csv", directory / "out", f"--spec={directory / 'spec.toml'}", *flags
    )
    return directory / "out" / "criteo_binary" / "split"
