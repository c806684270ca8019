"""Small logs with tables of users and items, and the same logs joined by plain Python.

Prices of items change in the log's days; an item or a user may be in no table.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.spec_variants import drop_tables
from nvt_torchrec.formats.feature_spec.toml_file import load_spec

DAY = 86_400
SPEC = """
[input]
format = "csv"
nulls = ["NA"]
[label]
name = "clicked"
[split]
{split}
[[table]]
name = "items"
path = "items*"
key = {{item = "id"}}
{versions}
[[table]]
name = "users"
path = "users.csv"
key = ["user", "country"]
[[dense]]
names = "price"
raw = "float"
table = "items"
[[dense]]
names = "age"
table = "users"
[[categorical]]
names = "item"
raw = "int"
[[categorical]]
names = "country"
raw = "string"
[[categorical]]
names = ["brand", "category"]
raw = "string"
table = "items"
[[categorical]]
names = "tags"
raw = "int"
multi_hot = true
table = "items"
[[categorical]]
names = "age_group"
from = "age"
derive = "bucket"
boundaries = [30, 50]
table = "users"
[[categorical]]
names = "job"
raw = "string"
table = "users"
freq_threshold = 8
{more}
"""
BY_DAYS = 'by = "days"'
BY_TIME = (
    'by = "time"\ncolumn = "time"\ntime_format = "epoch_s"\n'
    'valid_from = "1970-01-03"\ntest_from = "1970-01-03 12:00"'
)
VERSIONS = 'valid_from = "changed"\ntime_format = "epoch_s"\nknown = "1h"'
EVENTS = """
[events]
time = "time"
time_format = "epoch_s"
[[aggregate]]
of = "user"
values = "count"
[[history]]
name = "recent"
of = "user"
columns = ["item", "brand"]
"""
#: What the tables have, in the order of the joined log.
ITEM_COLUMNS = ("price", "brand", "category", "tags")
USER_COLUMNS = ("age", "job")


@dataclasses.dataclass(frozen=True)
class Impression:
    """A row of the log; "" is missing."""

    time: int
    user: str
    country: str
    item: str
    clicked: int


@dataclasses.dataclass(frozen=True)
class Item:
    """A row of the table of items; ``changed`` is when it began to count."""

    id: str
    changed: int
    price: str
    brand: str
    category: str
    tags: str


@dataclasses.dataclass(frozen=True)
class User:
    """A row of the table of users."""

    user: str
    country: str
    age: str
    job: str


def make_impressions(count: int, days: int, seed: int = 0) -> list[Impression]:
    """Impressions in the order of time, many of them in the same second."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, days * DAY // 1800, count)) * 1800
    rows = []
    for time in times.tolist():
        user, item = rng.integers(0, 9), rng.integers(0, 14)
        rows.append(
            Impression(
                time,
                f"u{user}" if user else "",
                rng.choice(["at", "de", ""]),
                f"{item:02d}" if item % 3 else str(item),  # the same number
                int(rng.random() < 0.4),
            )
        )
    return rows


def make_items(seed: int = 0, *, versions: int = 1, first: int = 0) -> list[Item]:
    """Items 0 to 11, each with so many versions from day ``first`` on, in any order."""
    rng = np.random.default_rng(seed)
    rows = []
    for item in range(12):
        starts = rng.choice(6 * DAY // 1800, versions, replace=False) * 1800
        for start in starts.tolist():
            tags = rng.integers(0, 9, rng.integers(0, 4)).tolist()
            rows.append(
                Item(
                    id=str(item),
                    changed=first * DAY + start - 3 * DAY,
                    price=rng.choice(["", "NA", f"{rng.lognormal(3):.2f}"], p=[0.1, 0.1, 0.8]),
                    brand=f"b{item % 4}",
                    category=rng.choice(["", "shoes", "hats", "größe"]),
                    tags="|".join(map(str, tags)),
                )
            )
    return [rows[i] for i in rng.permutation(len(rows))]


def make_users(seed: int = 0) -> list[User]:
    """Users 1 to 7 in each country."""
    rng = np.random.default_rng(seed)
    return [
        User(f"u{number}", country, str(rng.integers(18, 80)), f"j{rng.integers(0, 5)}")
        for number in range(1, 8)
        for country in ("at", "de")
    ]


def write_rows(path: Path, rows: Sequence[Impression | Item | User]) -> None:
    """Write rows as csv, or as the ending of the name says."""
    names = [field.name for field in dataclasses.fields(rows[0])]
    records = [dataclasses.asdict(row) for row in rows]
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(records)
        return
    typed = [_to_types(record) for record in records]
    if path.suffix == ".jsonl":
        lines = [json.dumps(record, ensure_ascii=False) for record in typed]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        pd.DataFrame(typed).to_parquet(path)


def _to_types(record: Mapping[str, object]) -> dict[str, object]:
    """Return an item as tables with types hold it."""
    values = {name: value or None for name, value in record.items()}
    price, tags = record["price"], str(record["tags"])
    return values | {
        "id": int(str(record["id"])),
        "changed": record["changed"],
        "price": None if price in ("", "NA") else float(str(price)),
        "tags": [int(tag) for tag in tags.split("|")] if tags else None,
    }


def load_table_spec(
    directory: Path, split: str = BY_DAYS, *, versions: str = "", more: str = ""
) -> FeatureSpec:
    """Return the spec of a log with tables."""
    file = directory / "spec.toml"
    file.write_text(SPEC.format(split=split, versions=versions, more=more))
    return load_spec(file)


def joined_spec(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec of the same log with the columns of its tables."""
    return dataclasses.replace(drop_tables(spec), tables=())


def find_item(
    items: Sequence[Item], row: Impression, *, delay: int | None, by_day: bool = False
) -> Item | None:
    """Return what is known of a row's item; with ``delay``, as of the time of the row."""
    cut = row.time // DAY * DAY if by_day else row.time
    known = [item for item in items if row.item and int(item.id) == int(row.item)]
    if delay is not None:
        known = [item for item in known if item.changed + delay < cut]
    return max(known, key=lambda item: item.changed, default=None)


def write_joined(
    path: Path,
    rows: Sequence[Impression],
    items: Sequence[Item],
    users: Sequence[User],
    *,
    delay: int | None = None,
) -> None:
    """Write a log with the columns of its tables, joined by looking at all of them."""
    names = [field.name for field in dataclasses.fields(Impression)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *ITEM_COLUMNS, *USER_COLUMNS])
        for row in rows:
            item = find_item(items, row, delay=delay)
            user = next((u for u in users if (u.user, u.country) == (row.user, row.country)), None)
            joined = [getattr(item, name, "") for name in ITEM_COLUMNS]
            joined += [getattr(user, name, "") for name in USER_COLUMNS]
            writer.writerow([*dataclasses.astuple(row), *joined])
