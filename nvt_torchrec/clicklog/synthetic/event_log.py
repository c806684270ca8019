"""A synthetic log of events: clicks that depend on earlier rows of the same user.

A click depends on the user only by the share of the user's earlier rows that were clicked, the
hours since the last row, and the share of the last ten clicks with the item's category. There are
many users with few rows each, so a user's id is hardly informative, but aggregates and a history
are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import to_arrow

#: The part of the spec for the log's events.
EVENTS = """[events]
time = "time"

[[aggregate]]
of = ["user"]

[[aggregate]]
of = ["item"]
values = ["count", "rate"]

[[history]]
name = "liked"
of = ["user"]
columns = ["category"]
where = "click"
"""
LABEL = """[label]
name = "click"
"""
#: The beginning of specs of logs in the order of time; valid and test begin at these times.
SPEC_HEAD = f"""[input]
format = "csv"

{LABEL}
[split]
by = "time"
column = "time"
valid_from = "{{valid}}"
test_from = "{{test}}"

"""
#: The part of the spec for the columns of the log.
COLUMNS = """[[dense]]
names = "price"
raw = "float"

[[categorical]]
names = ["user", "item", "category"]
raw = "int"

"""
#: The seconds of a day.
DAY = 86_400
#: The first second of a log, 2026-09-21.
BEGIN = 1_789_948_800
_ITEMS = 1_000
_CATEGORIES = 20
#: The mean number of rows of a user.
_ROWS_PER_USER = 25
#: The number of a user's last clicks that matter.
_NEWEST_CLICKS = 10


def draw_zipf(random: np.random.Generator, rows: int, values: int) -> np.ndarray:
    """Draw ranks from 0 to values - 1, with probabilities proportional to (rank + 1) ** -0.8."""
    shares = 1 / np.arange(1, values + 1) ** 0.8
    return random.choice(values, rows, p=shares / shares.sum())


def draw_events(
    rows: int,
    days: int,
    seed: int,
    begin: int = BEGIN,
    advance: Callable[[int], object] = lambda rows: None,
) -> tuple[np.ndarray, np.ndarray, pa.Table]:
    """Draw a log in the order of time, which takes about 300 bytes of memory per row.

    Args:
        rows: The number of rows.
        days: The number of days that the rows are spread over.
        seed: The seed.
        begin: The first second, since 1970 UTC.
        advance: Called with the number of rows drawn since the last call.

    Returns:
        The log odds of the clicks, float64 [rows]; the seconds since ``begin``, int64 [rows],
        ascending; and the columns ``time``, ``user``, ``item``, ``category``, ``price``, ``click``.
    """
    random = np.random.default_rng(seed)
    # The order of these draws is part of the format: a seed gives the same log in every version.
    users = max(rows // _ROWS_PER_USER, 1)
    category = random.integers(0, _CATEGORIES, _ITEMS)
    user = random.integers(0, users, rows)
    item = draw_zipf(random, rows, _ITEMS)
    seconds = np.sort(random.integers(0, days * DAY, rows))
    uniform = random.random(rows)
    item_effects = random.normal(0, 0.4, _ITEMS)
    # for each user: the rows and clicks so far, the second of the last row, the clicked categories
    seen = np.zeros(users)
    clicks = np.zeros(users)
    last = np.full(users, -(10**6))
    liked: list[list[int]] = [[] for _ in range(users)]
    logits = np.empty(rows)
    for row, (u, i, now) in enumerate(zip(user, item, seconds, strict=True)):
        newest = liked[u][-_NEWEST_CLICKS:]
        same = newest.count(category[i]) / len(newest) if newest else 0.0
        # rows of the same second have no effect, because only strictly earlier events are known
        click_share = (clicks[u] + 1) / (seen[u] + 4) if last[u] < now else 0.0
        logits[row] = -2.6 + 3.5 * click_share + 4 * same + item_effects[i]
        logits[row] -= 0.25 * np.log1p((now - last[u]) / 3600)
        clicked = uniform[row] < 1 / (1 + np.exp(-logits[row]))
        seen[u] += 1
        clicks[u] += clicked
        last[u] = now
        if clicked:
            liked[u].append(category[i])
        advance(1)
    columns = {
        "time": format_seconds(begin + seconds),
        "user": to_arrow(user),
        "item": to_arrow(item),
        "category": to_arrow(category[item]),
        "price": to_arrow(random.lognormal(3, 1, rows).round(2)),
        "click": to_arrow((uniform < 1 / (1 + np.exp(-logits))).astype(np.int64)),
    }
    return logits, seconds, pa.table(columns)


def format_seconds(seconds: np.ndarray) -> pa.Array:
    """Return seconds since 1970 UTC as texts."""
    return pc.strftime(to_arrow(seconds).cast(pa.timestamp("s")), "%Y-%m-%d %H:%M:%S")
