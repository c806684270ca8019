"""A synthetic log with tables: clicks that depend on the price at the time, and on the user.

The log has a user, an item and a time. What decides is in two tables: the price of an item, which
changes every day or two, its brand, and whether its category is that of the user's segment. Users
are many and their rows few, so that an id says little.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.clicklog.synthetic.event_log import BEGIN, DAY, draw_zipf, format_seconds

#: The part of a spec about the tables and the columns of the log.
TABLES_AND_COLUMNS = """[[table]]
name = "items"
path = "items.csv"
key = "item"
valid_from = "changed"

[[table]]
name = "users"
path = "users.csv"
key = {user = "user_id"}

[[dense]]
names = "price"
raw = "float"
table = "items"

[[categorical]]
names = ["user", "item"]
raw = "int"

[[categorical]]
names = ["brand", "category"]
raw = "int"
table = "items"

[[categorical]]
names = "segment"
raw = "int"
table = "users"
"""
_ITEMS = 1_000
_BRANDS = 40
_CATEGORIES = 8
#: The mean number of rows of a user.
_ROWS_PER_USER = 25


def draw_tables(
    rows: int, days: int, seed: int, advance: Callable[[int], object] = lambda rows: None
) -> tuple[np.ndarray, np.ndarray, pa.Table, dict[str, pa.Table]]:
    """Draw a log in the order of time, and its tables.

    Args:
        rows: The number of rows.
        days: The days that they are spread over.
        seed: The seed.
        advance: Called with the number of rows that were drawn.

    Returns:
        The log odds of the clicks, float64 [rows]; the seconds since :data:`.event_log.BEGIN`,
        int64 [rows], ascending; the columns ``time``, ``user``, ``item``, ``click``; by name, the
        tables ``items``, with each price from when it counted, and ``users``.
    """
    random = np.random.default_rng(seed)
    # The order of these draws is part of the format: a seed gives the same log in every version.
    users = max(rows // _ROWS_PER_USER, 1)
    user = random.integers(0, users, rows)
    item = draw_zipf(random, rows, _ITEMS)
    seconds = np.sort(random.integers(0, days * DAY, rows))
    brand = random.integers(0, _BRANDS, _ITEMS)
    category = random.integers(0, _CATEGORIES, _ITEMS)
    segment = random.integers(0, _CATEGORIES, users)
    brand_effects = random.normal(0, 0.7, _BRANDS)

    # When each price of an item begins, every day or two; the first one before the log does.
    changes = random.integers(1, DAY, (_ITEMS, days + 1)).cumsum(axis=1) * 3 // 2
    changes[:, 0] = -DAY
    log_price = random.normal(3, 0.5, (_ITEMS, 1)) + random.normal(0, 0.7, changes.shape)
    price = np.exp(log_price).round(2)
    version = (changes[item] < seconds[:, np.newaxis]).sum(axis=1) - 1

    logits = -1.5 - 1.2 * (np.log(price[item, version]) - 3) + brand_effects[brand[item]]
    logits += 1.8 * (segment[user] == category[item])
    clicked = random.random(rows) < 1 / (1 + np.exp(-logits))
    advance(rows)
    log = pa.table(
        {
            "time": format_seconds(BEGIN + seconds),
            "user": to_arrow(user),
            "item": to_arrow(item),
            "click": to_arrow(clicked.astype(np.int64)),
        }
    )
    every_item = np.repeat(np.arange(_ITEMS), changes.shape[1])
    items = {
        "item": to_arrow(every_item),
        "changed": format_seconds(BEGIN + changes.reshape(-1)),
        "price": to_arrow(price.reshape(-1)),
        "brand": to_arrow(brand[every_item]),
        "category": to_arrow(category[every_item]),
    }
    user_columns = {"user_id": to_arrow(np.arange(users)), "segment": to_arrow(segment)}
    return logits, seconds, log, {"items": pa.table(items), "users": pa.table(user_columns)}
