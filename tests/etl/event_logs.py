"""Small event logs, and what a loop over all pairs of their rows says happened before each."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import strings
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.histories import HistoryStore
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.description import inspect

DAY, HOUR = 86_400, 3600
SPEC = """
[input]
format = "csv"
[label]
name = "clicked"
[split]
{split}
[events]
time = "time"
time_format = "epoch_s"
{events}
[[aggregate]]
of = "user"
smoothing = 3
[[aggregate]]
of = "user"
values = ["rate", "count"]
window = "12h"
smoothing = 2
[[aggregate]]
of = ["user", "item"]
values = ["count", "since"]
[[aggregate]]
of = []
smoothing = 2
[[aggregate]]
of = []
values = ["count", "rate"]
window = "12h"
smoothing = 2
[[history]]
name = "recent"
of = "user"
columns = ["item", "shop"]
[[history]]
name = "liked"
of = ["item"]
columns = "item"
where = "clicked"
[[dense]]
names = "price"
raw = "float"
[[categorical]]
names = "item"
raw = "string"
[[categorical]]
names = "shop"
raw = "int"
"""
BY_TIME = 'by = "time"\ncolumn = "time"\ntime_format = "epoch_s"\nvalid = 0.2\ntest = 0.2'
BY_DAYS = 'by = "days"'


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the log; ``user`` "" is missing."""

    time: int
    user: str
    item: str
    clicked: int
    arrived: int = 0

    @property
    def shop(self) -> str:
        """Often missing; some shops occur after the training days only."""
        number = self.time // 900 % 11
        return "" if number % 3 == 0 else str(number + self.time // DAY // 3)

    def text(self) -> str:
        fields = self.time, self.user, self.item, self.time % 7, self.clicked, self.arrived
        return ",".join(map(str, (*fields, self.shop)))


def make_rows(count: int, days: int, seed: int = 0, step: int = 900) -> list[Row]:
    """Rows in any order within a day, many of them at the same time, of few users and items."""
    random = np.random.default_rng(seed)
    times = np.sort(random.integers(0, days * DAY // step, count)) * step
    rows = []
    for day in range(days):
        of_day = random.permutation(times[times // DAY == day])
        for time in of_day.tolist():
            user = random.choice(["", "u1", "u2", "u3", "u4"], p=[0.05, 0.5, 0.3, 0.1, 0.05])
            arrived = time + int(random.integers(-1, 3)) * HOUR  # clocks differ
            item = f"i{random.integers(0, 4)}"
            rows.append(Row(time, str(user), item, int(random.random() < 0.4), arrived))
    return rows


def write(path: Path, rows: list[Row]) -> None:
    lines = ["time,user,item,price,clicked,arrived,shop", *(row.text() for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def expected(rows: list[Row], events: str) -> list[dict[str, float]]:
    """The raw values of the aggregates of each row; NaN where missing."""
    delay = HOUR if "known" in events else 0

    def known(row: Row) -> int:
        return max(row.time, row.arrived) if "from" in events else row.time + delay

    def cut(row: Row) -> int:
        return row.time // DAY * DAY if "day" in events else row.time

    def since(row: Row, seen: list[Row]) -> float:
        last = max((other.time for other in seen), default=None)
        return math.nan if last is None else max(cut(row) - last, 0)

    values = []
    for row in rows:
        before = [other for other in rows if known(other) < cut(row)]
        hour = [other for other in rows if known(other) // HOUR < cut(row) // HOUR]
        prior = sum(other.clicked for other in hour) / len(hour) if hour else math.nan
        newer_of_all = [other for other in before if known(other) >= cut(row) - 12 * HOUR]
        of_user = [other for other in before if row.user and other.user == row.user]
        newer = [other for other in of_user if known(other) >= cut(row) - 12 * HOUR]
        of_pair = [other for other in of_user if other.item == row.item]

        def smoothed(seen: list[Row], weight: int, prior: float = prior) -> float:
            return (sum(o.clicked for o in seen) + weight * prior) / (len(seen) + weight)

        values.append(
            {
                "user_count": len(of_user),
                "user_clicked_rate": smoothed(of_user, 3),
                "user_since": since(row, of_user),
                "user_clicked_rate_12h": smoothed(newer, 2),
                "user_count_12h": len(newer),
                "user_item_count": len(of_pair),
                "user_item_since": since(row, of_pair),
                "all_count": len(before),
                "all_clicked_rate": smoothed(before, 2),
                "all_since": since(row, before),
                "all_count_12h": len(newer_of_all),
                "all_clicked_rate_12h": smoothed(newer_of_all, 2),
            }
        )
    return values


def expected_lists(rows: list[Row], events: str) -> dict[str, list[list[str]]]:
    """The values of the histories of each row, oldest first; of events known at once in order."""
    lists: dict[str, list[list[str]]] = {"recent.item": [], "recent.shop": [], "liked.item": []}
    for row in rows:
        cut = row.time // DAY * DAY if "day" in events else row.time
        before = [(known_of(r, events), i) for i, r in enumerate(rows) if known_of(r, events) < cut]
        seen = [rows[i] for _, i in sorted(before)]
        of_user = [other for other in seen if row.user and other.user == row.user]
        lists["recent.item"].append([other.item for other in of_user])
        lists["recent.shop"].append([other.shop for other in of_user])
        liked = [other.item for other in seen if other.item == row.item and other.clicked]
        lists["liked.item"].append(liked)
    return lists


def known_of(row: Row, events: str) -> int:
    if "from" in events:
        return max(row.time, row.arrived)
    return row.time + (HOUR if "known" in events else 0)


def read_lists(output: Path, split: str) -> dict[str, list[list[int]]]:
    """The ids of the histories of a split's rows, as the parquet and the store have them."""
    description = inspect(output / "workflow")
    schema, there = description.table_schema, parquet(output, split)
    sizes = dict(zip(schema.categorical, schema.table_sizes, strict=True))
    lists: dict[str, list[list[int]]] = {}
    for history in schema.histories:
        splits = output / "criteo_binary/split"
        store = HistoryStore(splits, history, [sizes[name] for name in history.columns])
        pointers = (there[name].tolist() for name in history.pointers)
        found = [store.read_newest(*pointer, 10**6) for pointer in zip(*pointers, strict=True)]
        for place, feature in enumerate(history.features):
            lists[feature] = [row[place].tolist() for row in found]
    return lists


def assert_lists(output: Path, split: str, wanted: dict[str, list[list[str]]]) -> None:
    encoder = compiled.load(output / "workflow")
    there = read_lists(output, split)
    for feature, values in wanted.items():
        column = feature.partition(".")[2]
        flat = sorted({value for row in values for value in row if value})
        raw = strings(flat) if column == "item" else np.array(flat, np.int64)
        ids = dict(zip(flat, encoder.encode_values(column, raw).tolist(), strict=True))
        ids[""] = 1
        assert there[feature] == [[ids[value] for value in row] for row in values], feature


def transformed(output: Path, values: list[dict[str, float]], name: str) -> np.ndarray:
    """What the workflow makes of raw values of a dense column."""
    description = inspect(output / "workflow")
    column = next(column for column in description.spec.dense if column.name == name)
    raw = np.array([row[name] for row in values])
    raw = np.where(np.isnan(raw), column.fill, raw)
    y = description.spec.get_transform(column).apply(raw, np)
    of = description.statistics[name]
    return (y - of["mean"]) / (of["std"] or 1)


def parquet(output: Path, split: str) -> dict[str, np.ndarray]:
    table = pq.read_table(output / "criteo_binary/split" / split)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def spec_of(tmp_path: Path, split: str, events: str) -> FeatureSpec:
    file = tmp_path / "spec.toml"
    file.write_text(SPEC.format(split=split, events=events))
    return load_spec(file)


def frame_of(rows: list[Row]) -> pd.DataFrame:
    columns = {"user": [row.user or None for row in rows], "item": [row.item for row in rows]}
    shops = pd.array([int(row.shop) if row.shop else None for row in rows], "Int64")
    return pd.DataFrame({**columns, "price": [row.time % 7 for row in rows], "shop": shops})
