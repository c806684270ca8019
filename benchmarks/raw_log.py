"""Draw the raw logs of the benchmarks of events, tables, event sources and negatives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

#: The days of a log.
DAYS = 30
#: The seconds of a log.
SECONDS = DAYS * 86_400
#: The share of rows with label 1.
_POSITIVES = 0.2


def draw_user_shares(random: np.random.Generator, users: int) -> np.ndarray:
    """Draw each user's share of the rows, float64 [users]; a few users have most of the rows."""
    weights = random.pareto(1.5, users) + 0.5
    return weights / weights.sum()


def draw_log(
    random: np.random.Generator,
    rows: int,
    users: int,
    items: int,
    user_shares: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Draw time, user and item of rows, sorted by time.

    Args:
        random: The generator.
        rows: The number of rows.
        users: The number of users.
        items: The number of items, which are numbered from 1; a few items are in most of the rows.
        user_shares: Each user's share of the rows; None for equal shares.
    """
    time = np.sort(random.integers(0, SECONDS, rows))
    if user_shares is None:
        user = random.integers(0, users, rows)
    else:
        user = random.choice(users, rows, p=user_shares)
    return {"time": time, "user": user, "item": draw_items(random, rows, items)}


def draw_items(random: np.random.Generator, rows: int, items: int) -> np.ndarray:
    """Draw items, numbered from 1, int64 [rows]; a few items are in most of the rows."""
    return np.minimum(random.zipf(1.3, rows), items)


def draw_prices(random: np.random.Generator, rows: int) -> np.ndarray:
    """Draw amounts of money, float64 [rows]."""
    return random.lognormal(3, 1, rows).round(2)


def draw_labels(random: np.random.Generator, rows: int) -> np.ndarray:
    """Draw labels, int8 [rows]."""
    return (random.random(rows) < _POSITIVES).astype(np.int8)


def write_csv(columns: Mapping[str, np.ndarray], file: Path) -> None:
    """Write columns as CSV with a header."""
    pa_csv.write_csv(pa.table(dict(columns)), file)
