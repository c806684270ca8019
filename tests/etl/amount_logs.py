"""Logs of events with numbers, and what a loop over all pairs of their rows makes of these."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from tests.etl.event_logs import DAY, HOUR, Row, known_of, make_rows

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
values = ["sum(amount)", "mean(amount)", "min(amount)", "max(amount)", "last(amount)", "count",
    "distinct(item)", "distinct(shop)"]
[[aggregate]]
of = "user"
values = [
    "last(amount)", "sum(price)", "max(amount)", "distinct(shop)", "mean(amount)", "min(price)",
]
window = "12h"
[[aggregate]]
of = ["user", "item"]
values = ["min(amount)", "max(amount)", "last(price)"]
window = "3h"
[[aggregate]]
of = []
values = ["sum(amount)", "max(amount)", "min(amount)", "last(amount)", "distinct(item)"]
window = "12h"
[[aggregate]]
of = "shop"
values = "mean(price)"
[[dense]]
names = "price"
raw = "float"
[[categorical]]
names = "item"
raw = "string"
"""
WINDOWS = {"12h": 12 * HOUR, "3h": 3 * HOUR}


@dataclasses.dataclass(frozen=True)
class Purchase:
    """A row of the log; an amount of NaN is missing. The price is that of the row's own time."""

    row: Row
    amount: float

    @property
    def price(self) -> float:
        return float(self.row.time // 900 % 7)

    def text(self) -> str:
        amount = "" if math.isnan(self.amount) else repr(self.amount)
        row = self.row
        fields = row.time, row.user, row.item, self.price, row.clicked, row.arrived, row.shop
        return ",".join(map(str, (*fields, amount)))


def make_purchases(count: int, days: int, seed: int) -> list[Purchase]:
    """Rows as of :func:`make_rows`: with amounts of all sizes, negative ones, and many missing."""
    random = np.random.default_rng(seed)
    usual = [0.1, -0.1, 2.5, 1e-9, -1e9 / 3, 2.0**53, -(2.0**53), 7.0, math.nan, math.nan]
    amounts = random.choice(usual, count) * random.choice([1, 1, 0.3], count)
    rows = make_rows(count, days, seed)
    return [Purchase(row, float(a)) for row, a in zip(rows, amounts, strict=True)]


def write(path: Path, purchases: list[Purchase]) -> None:
    header = "time,user,item,price,clicked,arrived,shop,amount"
    path.write_text("\n".join([header, *(purchase.text() for purchase in purchases), ""]))


def spec_of(tmp_path: Path, split: str, events: str) -> FeatureSpec:
    file = tmp_path / "spec.toml"
    file.write_text(SPEC.format(split=split, events=events))
    return load_spec(file)


def frame_of(purchases: list[Purchase], *, times: bool = False) -> pd.DataFrame:
    """The rows as those to score, without amounts."""
    rows = [purchase.row for purchase in purchases]
    columns = {
        "user": [row.user or None for row in rows],
        "item": [row.item for row in rows],
        "shop": [row.shop or None for row in rows],
        "price": [purchase.price for purchase in purchases],
    }
    if times:
        columns["time"] = [row.time for row in rows]
    return pd.DataFrame(columns)


def key_of(row: Row, columns: tuple[str, ...]) -> tuple[str, ...] | None:
    """The key of a row; None where a column is missing."""
    key = tuple(getattr(row, name) for name in columns)
    return None if "" in key else key


def value_of(value: str, numbers: list[float], events: int) -> float:
    """A value of the numbers of events, the oldest first."""
    if value == "count":
        return events
    there = [number for number in numbers if not math.isnan(number)]
    if value in ("sum", "mean"):
        step = Fraction(1, 2**42)
        total = sum((round(Fraction(number) / step) * step for number in there), Fraction())
        return (
            float(total) / (len(there) if value == "mean" else 1)
            if there
            else (0 if value == "sum" else math.nan)
        )
    if not there:
        return math.nan
    return {"min": min(there), "max": max(there), "last": there[-1]}[value]


def expected(
    spec: FeatureSpec, log: list[Purchase], rows: list[Purchase], events: str
) -> list[dict[str, float]]:
    """The values of all aggregates of some rows, in their units; NaN where missing.

    Args:
        spec: The columns.
        log: The events, in the order of the files.
        rows: The rows.
        events: What ``[events]`` has.
    """
    in_order = sorted(log, key=lambda purchase: known_of(purchase.row, events))
    values = []
    for purchase in rows:
        row = purchase.row
        cut = row.time // DAY * DAY if "day" in events else row.time
        before = [other for other in in_order if known_of(other.row, events) < cut]
        found = {}
        for column in spec.aggregates:
            rule = column.aggregate
            key = key_of(row, rule.key)
            seen = [o for o in before if key is not None and key_of(o.row, rule.key) == key]
            if rule.window:
                begin = cut - WINDOWS[rule.window]
                seen = [other for other in seen if known_of(other.row, events) >= begin]
            if rule.value == "distinct":
                found[column.name] = len({getattr(o.row, rule.column) for o in seen} - {""})
                continue
            numbers = [getattr(other, rule.column) for other in seen] if rule.column else []
            found[column.name] = value_of(rule.value, numbers, len(seen))
        values.append(found)
    return values
