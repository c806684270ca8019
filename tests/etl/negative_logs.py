"""Small logs of likes, and which rows a run drew beside them."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.workflows.description import inspect
from tests.etl.runs import read_split

DAY = 86_400
SPEC = """
dense_transform = "normalize"
[input]
format = "csv"
[label]
name = "liked"
{label}
[split]
{split}
[[dense]]
names = ["number", "hour"]
raw = "float"
[[dense]]
names = "item_number"
from = "item"
raw = "float"
[[categorical]]
names = ["user", "tags"]
raw = "string"
[[categorical]]
names = "item"
raw = "int"
[[categorical]]
names = "item_group"
from = "item"
derive = "bucket"
boundaries = [4, 9]
[negatives]
item = "item"
user = "user"
per_positive = 3
{negatives}
{more}
"""
TABLE = """
[[table]]
name = "items"
path = "items.csv"
key = {item = "id"}
valid_from = "since"
time_format = "epoch_s"
log_time = "time"
log_time_format = "epoch_s"
[[dense]]
names = "price"
raw = "float"
table = "items"
[[categorical]]
names = "brand"
raw = "string"
table = "items"
"""
#: How the label is read; without a column for it.
STARS, ALL = 'from = "stars"\nthreshold = 3', "value = 1"
BY_DAYS = 'by = "days"'
BY_TIME = (
    'by = "time"\ncolumn = "time"\ntime_format = "epoch_s"\n'
    'valid_from = "1970-01-03"\ntest_from = "1970-01-03 12:00"'
)


@dataclasses.dataclass(frozen=True)
class Like:
    """A row of the log; a missing user or item is "". ``number`` counts the rows."""

    number: int
    time: int
    user: str
    item: str
    stars: int
    hour: int
    tags: str

    @property
    def liked(self) -> bool:
        return self.stars >= 3


@dataclasses.dataclass(frozen=True)
class Product:
    """A version of an item in the table."""

    id: int
    since: int
    price: float
    brand: str


def make_likes(count: int, days: int, seed: int = 0, *, items: int = 14) -> list[Like]:
    """Rows in the order of time, many of one time; small items appear first, and are liked most."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, days * DAY // 1800, count)) * 1800
    rows = []
    for number, time in enumerate(times.tolist()):
        item = int(rng.integers(0, 1 + (items - 1) * time // (days * DAY) + 1))
        text = f"{item:02d}" if number % 3 else str(item)  # the same number
        rows.append(
            Like(
                number,
                time,
                "" if number % 29 == 0 else f"u{rng.integers(0, 25)}",
                "" if number % 31 == 0 else text,
                int(rng.integers(1, 6)),
                time // 3600 % 24,
                f"t{rng.integers(0, 3)}",
            )
        )
    return rows


def make_products(items: int = 20) -> list[Product]:
    """Items, each with two versions; some appear late, some are in no row of the log."""
    rng = np.random.default_rng(5)
    rows = []
    for item in range(items):
        first = (item - 4) * DAY // 6
        for start in (first, first + DAY):
            rows.append(Product(item, start, float(rng.integers(1, 50)), f"b{item % 5}"))
    return rows


def write_csv(path: Path, rows: Sequence[Like | Product], **more: Sequence[object]) -> None:
    """Write rows with the names of their fields; ``more`` has further columns."""
    names = [field.name for field in dataclasses.fields(rows[0])]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *more])
        columns = zip(*more.values(), strict=True) if more else [()] * len(rows)
        for row, added in zip(rows, columns, strict=True):
            writer.writerow([*dataclasses.astuple(row), *added])


def load_negative_spec(
    directory: Path,
    split: str = BY_DAYS,
    *,
    label: str = STARS,
    negatives: str = "",
    more: str = "",
) -> FeatureSpec:
    """Return the spec of such a log."""
    file = directory / "spec.toml"
    file.write_text(SPEC.format(split=split, label=label, negatives=negatives, more=more))
    return load_spec(file)


def without_negatives(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec of a log that has its negatives."""
    return dataclasses.replace(spec, negatives=None)


def read_drawn(output: Path, split: str) -> list[tuple[int, int, int]]:
    """Return the number, the item (-1: missing) and the label of each row of a split."""
    statistics = inspect(output / "workflow").statistics
    rows = read_split(output, split)

    def decode(name: str) -> np.ndarray:
        of = statistics[name]
        return np.rint(rows[name].to_numpy(np.float64) * of["std"] + of["mean"]).astype(int)

    items = np.where(rows["item"] == 1, -1, decode("item_number"))
    labels = rows["liked"].astype(int)
    return list(zip(decode("number").tolist(), items.tolist(), labels.tolist(), strict=True))


def expand(likes: Iterable[Like], drawn: Iterable[tuple[int, int, int]]) -> list[Like]:
    """Return the rows of a split as a log that holds the rows that were drawn.

    Raises:
        AssertionError: A row of the log is missing or changed.
    """
    by_number = {like.number: like for like in likes}
    rows: list[Like] = []
    for number, item, label in drawn:
        like = by_number[number]
        if rows and rows[-1].number == number:
            assert label == 0
            rows.append(dataclasses.replace(like, item=str(item), stars=1))
        else:
            assert label == like.liked
            assert item == (int(like.item) if like.item else -1)
            rows.append(like)
    return rows
