"""A synthetic log with tables: clicks that depend on the current price, and on the user.

The log has a user, an item and a time. Clicks depend on columns of two tables: the price of an
item, which changes every day or two, its brand, and whether its category is the user's segment.
There are many users with few rows each, so that ids are hardly informative.

With vectors, there are many items, too; half of them appear on later days, and most have an
embedding of their text, as from a text model. Clicks then also depend on how much all users, and
those of the user's segment, like the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import mask_to_arrow, to_arrow
from nvt_torchrec.clicklog.synthetic.event_log import BEGIN, DAY, draw_zipf, format_seconds

#: The part of the spec for the tables and the columns of the log.
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
#: The part of the spec for the embeddings of the items' texts.
VECTORS = """
[[table]]
name = "texts"
path = "texts.parquet"
key = "item"

[[vector]]
name = "text"
table = "texts"
from = "embedding"
width = 16
"""
#: The width of an embedding.
WIDTH = 16
_ITEMS = 1_000
_BRANDS = 40
_CATEGORIES = 8
#: The mean number of rows of a user.
_ROWS_PER_USER = 25
#: With vectors, the mean number of rows of an item.
_ROWS_PER_ITEM = 10
#: The share of items without an embedding.
_NO_TEXT = 0.05
#: The standard deviations of an embedding's effects on the log odds, for all users and by segment.
_LIKED_BY_ALL = 0.9
_LIKED_BY_SEGMENT = 0.9


def draw_tables(
    rows: int,
    days: int,
    seed: int,
    advance: Callable[[int], object] = lambda rows: None,
    *,
    vectors: bool = False,
) -> tuple[np.ndarray, np.ndarray, pa.Table, dict[str, pa.Table]]:
    """Draw a log in the order of time, and its tables.

    Args:
        rows: The number of rows.
        days: The number of days that the rows are spread over.
        seed: The seed.
        advance: Called with the number of rows that were drawn.
        vectors: Whether items have an embedding of their text.

    Returns:
        The log odds of the clicks, float64 [rows]; the seconds since :data:`.event_log.BEGIN`,
        int64 [rows], ascending; the columns ``time``, ``user``, ``item``, ``click``; and the tables
        by name: ``items``, with the time of each price, ``users``, and with vectors ``texts``,
        whose ``embedding`` is a list of :data:`WIDTH` float32 or null.
    """
    random = np.random.default_rng(seed)
    # The order of these draws is part of the format: a seed gives the same log in every version.
    users = max(rows // _ROWS_PER_USER, 1)
    num_items = max(rows // _ROWS_PER_ITEM, 1) if vectors else _ITEMS
    user = random.integers(0, users, rows)
    item = draw_zipf(random, rows, num_items)
    seconds = np.sort(random.integers(0, days * DAY, rows))
    if vectors:
        # Every other item appears on one of the days; until then, the previous item is shown.
        is_late = (item % 2 == 1) & (seconds < item // 2 % days * DAY)
        item -= is_late
    brand = random.integers(0, _BRANDS, num_items)
    category = random.integers(0, _CATEGORIES, num_items)
    segment = random.integers(0, _CATEGORIES, users)
    brand_effects = random.normal(0, 0.7, _BRANDS)

    # The times from which the prices of an item count: the first one is before the log, the others
    # follow every day or two.
    changes = random.integers(1, DAY, (num_items, days + 1)).cumsum(axis=1) * 3 // 2
    changes[:, 0] = -DAY
    log_price = random.normal(3, 0.5, (num_items, 1)) + random.normal(0, 0.7, changes.shape)
    price = np.exp(log_price).round(2)
    version = (changes[item] < seconds[:, np.newaxis]).sum(axis=1) - 1

    logits = -1.5 - 1.2 * (np.log(price[item, version]) - 3) + brand_effects[brand[item]]
    logits += 1.8 * (segment[user] == category[item])
    tables = {}
    if vectors:
        embeddings, has_text, liking = _draw_texts(seed, num_items)
        logits += has_text[item] * liking[segment[user], item]
        tables["texts"] = _make_texts(embeddings, has_text)
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
    every_item = np.repeat(np.arange(num_items), changes.shape[1])
    item_columns = {
        "item": to_arrow(every_item),
        "changed": format_seconds(BEGIN + changes.reshape(-1)),
        "price": to_arrow(price.reshape(-1)),
        "brand": to_arrow(brand[every_item]),
        "category": to_arrow(category[every_item]),
    }
    user_columns = {"user_id": to_arrow(np.arange(users)), "segment": to_arrow(segment)}
    tables |= {"items": pa.table(item_columns), "users": pa.table(user_columns)}
    return logits, seconds, log, tables


def _draw_texts(seed: int, num_items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw the embeddings of the items' texts, and their effects.

    Returns:
        Vectors of length 1, float32 [items, WIDTH]; whether an item has one, bool [items]; and its
        effect on the log odds for users of each segment, float64 [segments, items].
    """
    # A separate random stream, so that the rest of a log is the same as without vectors.
    random = np.random.default_rng([seed, WIDTH])
    values = random.standard_normal((num_items, WIDTH))
    embeddings = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)
    has_text = random.random(num_items) >= _NO_TEXT
    # A vector of length 1 times a direction of length sqrt(WIDTH) has the standard deviation 1.
    directions = random.standard_normal((1 + _CATEGORIES, WIDTH))
    directions *= math.sqrt(WIDTH) / np.linalg.norm(directions, axis=1, keepdims=True)
    liked = directions @ embeddings.T.astype(np.float64)
    return embeddings, has_text, _LIKED_BY_ALL * liked[0] + _LIKED_BY_SEGMENT * liked[1:]


def _make_texts(embeddings: np.ndarray, has_text: np.ndarray) -> pa.Table:
    """Return the table of embeddings, null for items without one."""
    offsets = np.arange(0, embeddings.size + 1, WIDTH, dtype=np.int32)
    lists = pa.ListArray.from_arrays(
        to_arrow(offsets), to_arrow(embeddings.reshape(-1)), mask=mask_to_arrow(~has_text)
    )
    return pa.table({"item": to_arrow(np.arange(len(embeddings))), "embedding": lists})
