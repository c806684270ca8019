"""Logs of clicks, purchases in other files, and what a loop over all of these says of a row."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from tests.etl.amount_logs import value_of

DAY, HOUR = 86_400, 3600
#: A click counts after 30 minutes, a purchase after 20.
CLICK_DELAY, PURCHASE_DELAY = 1800, 1200
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
known = "30m"
{events}
[[source]]
name = "purchases"
path = "purchases*"
time = "at"
time_format = "epoch_s"
known = "20m"
key = {{user = "user_id", item = "article"}}
nulls = "NA"
[[aggregate]]
of = "user"
source = "purchases"
values = ["count", "sum(amount)", "mean(amount)", "min(amount)", "max(amount)", "last(amount)",
    "distinct(article)", "distinct(shop)", "since"]
[[aggregate]]
of = "user"
source = "purchases"
values = ["count", "last(amount)", "sum(fee)", "max(amount)", "distinct(shop)", "mean(fee)"]
window = "12h"
[[aggregate]]
of = ["user", "item"]
source = "purchases"
values = ["count", "min(amount)", "last(fee)"]
window = "3h"
[[aggregate]]
of = []
source = "purchases"
values = ["count", "sum(amount)", "distinct(article)"]
window = "12h"
[[aggregate]]
of = "user"
values = ["count", "rate", "distinct(item)", "sum(price)"]
window = "12h"
smoothing = 2
[[history]]
name = "recent"
of = "user"
columns = "item"
[[dense]]
names = "price"
raw = "float"
[[categorical]]
names = "item"
raw = "int"
{more}
"""
TABLE = """
[[table]]
name = "cities"
path = "cities.csv"
key = "user"
[[categorical]]
names = "city"
raw = "string"
table = "cities"
"""
WINDOWS = {"": 0, "12h": 12 * HOUR, "3h": 3 * HOUR}


@dataclasses.dataclass(frozen=True)
class Click:
    """A row of the log; "" is missing. Items are numbers, with and without zeros before them."""

    time: int
    user: str
    item: str
    clicked: int

    @property
    def price(self) -> float:
        return float(self.time // 900 % 7)


@dataclasses.dataclass(frozen=True)
class Purchase:
    """An event of the source; "" is missing."""

    at: int
    user_id: str
    article: str
    amount: str
    fee: str
    shop: str


def make_clicks(count: int, days: int, seed: int) -> list[Click]:
    """Clicks in any order within a day, many of them of the same second."""
    rng = np.random.default_rng(seed)
    rows = []
    for day in range(days):
        times = day * DAY + rng.integers(0, DAY // 900, count // days) * 900
        for time in times.tolist():
            user = rng.choice(["", "u1", "u2", "u3"], p=[0.1, 0.4, 0.3, 0.2])
            item = int(rng.integers(0, 4))
            shown = f"{item:02d}" if time % 1800 else str(item)
            rows.append(Click(time, str(user), shown, int(rng.random() < 0.4)))
    return rows


def make_bought(count: int, first: int, end: int, seed: int) -> list[Purchase]:
    """Purchases from one day to another, in any order: at times that are known at those of rows."""
    rng = np.random.default_rng(seed)
    times = rng.integers(first * DAY // 300, end * DAY // 300, count) * 300
    amounts = ["0.1", "-0.1", "2.5", "1e-9", repr(-1e4 / 3), "12", "7", "", "NA"]
    return [
        Purchase(
            at=time,
            user_id=str(rng.choice(["", "u1", "u2", "u4"], p=[0.1, 0.5, 0.3, 0.1])),
            article=str(rng.choice(["", "0", "1", "01", "002", "3"])),
            amount=str(rng.choice(amounts)),
            fee=str(rng.choice(["", "1", "2", "3.5"])),
            shop=str(rng.choice(["", "NA", "a", "b", "größe"])),
        )
        for time in times.tolist()
    ]


def write_rows(path: Path, rows: Sequence[Click | Purchase], kind: type = Purchase) -> None:
    """Write rows as the ending of the name says."""
    names = [field.name for field in dataclasses.fields(kind)]
    records = [dataclasses.asdict(row) for row in rows]
    if kind is Click:
        names.append("price")
        records = [record | {"price": row.price} for record, row in zip(records, rows, strict=True)]
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(records)
        return
    typed = [_to_types(record) for record in records]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in typed))
    else:
        pd.DataFrame(typed).to_parquet(path)


def _to_types(record: dict) -> dict:
    """Return a purchase as files with types hold it: an article of pandas is a float."""
    there = {name: None if value in ("", "NA") else value for name, value in record.items()}
    numbers = {name: there[name] and float(there[name]) for name in ("article", "amount", "fee")}
    return {**there, **numbers}


def write_clicks(folder: Path, log: Sequence[Click]) -> list[list[Click]]:
    """Write a file for each day; return the rows of each."""
    folder.mkdir(exist_ok=True)
    days = []
    for day in sorted({row.time // DAY for row in log}):
        days.append([row for row in log if row.time // DAY == day])
        write_rows(folder / f"day_{day}.csv", days[-1], Click)
    return days


def load_source_spec(
    directory: Path, split: str, events: str = "", *, more: str = ""
) -> FeatureSpec:
    file = directory / "spec.toml"
    file.write_text(SPEC.format(split=split, events=events, more=more))
    return load_spec(file)


def number_of(text: str) -> float:
    return math.nan if text in ("", "NA") else float(text)


def as_item(text: str) -> str:
    """An item as its raw type compares it."""
    return str(int(text)) if text else ""


def key_of(event: Click | Purchase, key: tuple[str, ...]) -> tuple[str, ...] | None:
    """The key of a row or an event by the log's names; None where a column is missing."""
    user = event.user if isinstance(event, Click) else event.user_id
    item = event.item if isinstance(event, Click) else event.article
    values = tuple({"user": user, "item": as_item(item)}[name] for name in key)
    return None if "" in values else values


def expected(
    spec: FeatureSpec,
    bought: Sequence[Purchase],
    rows: Sequence[Click],
    *,
    by_day: bool = False,
    delay: int = PURCHASE_DELAY,
) -> list[dict[str, float]]:
    """The values of the source's aggregates of some rows, in their units; NaN where missing.

    Args:
        spec: The columns.
        bought: The events, in the order of their files.
        rows: The rows.
        by_day: Whether what is known before a row's day counts.
        delay: When an event is known, in seconds after it.
    """
    in_order = sorted(bought, key=lambda event: event.at)
    values = []
    for row in rows:
        cut = row.time // DAY * DAY if by_day else row.time
        before = [event for event in in_order if event.at + delay < cut]
        found: dict[str, float] = {}
        for column in spec.aggregates:
            rule = column.aggregate
            assert rule is not None
            if not rule.source:
                continue
            key = key_of(row, rule.key)
            seen = [e for e in before if key is not None and key_of(e, rule.key) == key]
            if rule.value == "since":
                last = max((event.at for event in seen), default=None)
                found[column.name] = math.nan if last is None else cut - last
                continue
            if rule.window:
                begin = cut - WINDOWS[rule.window]
                seen = [event for event in seen if event.at + delay >= begin]
            if rule.value == "distinct":
                texts = [getattr(event, rule.column) for event in seen]
                if rule.column == "article":
                    texts = [as_item(text) for text in texts]
                found[column.name] = len({*texts} - {"", "NA"})
                continue
            numbers = [number_of(getattr(event, rule.column)) for event in seen if rule.column]
            found[column.name] = value_of(rule.value, numbers, len(seen))
        values.append(found)
    return values


def frame_of(rows: Sequence[Click]) -> pd.DataFrame:
    """The rows as those to score: what the log has, without the label."""
    return pd.DataFrame(
        {
            "user": [row.user or None for row in rows],
            "item": [int(row.item) for row in rows],
            "price": [row.price for row in rows],
            "time": [row.time for row in rows],
        }
    )
