"""Small logs whose items have vectors, and the vector of each row as plain Python finds it."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.vectors import VECTORS, VectorStore, VectorStores
from tests.etl.runs import read_split

DAY = 86_400
#: The numbers of ``text`` and of ``image``.
WIDTH = 3
IMAGE_WIDTH = 2
SPEC = """
dense_transform = "normalize"
[input]
format = "csv"
[label]
name = "clicked"
{label}
[split]
by = "time"
column = "time"
time_format = "epoch_s"
valid_from = "1970-01-03"
test_from = "1970-01-03 12:00"
[[table]]
name = "items"
path = "items*"
key = {{item = "id"}}
{versions}
[[dense]]
names = "price"
raw = "float"
table = "items"
[[dense]]
names = "row"
raw = "float"
[[categorical]]
names = ["item", "user"]
raw = "int"
[[vector]]
name = "text"
table = "items"
from = "embedding"
width = 3
[[vector]]
name = "image"
table = "items"
width = 2
dtype = "float16"
{more}
"""
VERSIONS = 'valid_from = "changed"\ntime_format = "epoch_s"\nknown = "1h"'
EVENTS = """
[events]
time = "time"
time_format = "epoch_s"
[[history]]
name = "recent"
of = "user"
columns = ["item"]
"""


@dataclasses.dataclass(frozen=True)
class Item:
    """A version of an item; an empty vector is missing."""

    id: int
    changed: int
    price: float
    embedding: tuple[float, ...] = ()
    image: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the log, whose item -1 is missing."""

    row: int
    time: int
    user: int
    item: int
    clicked: int


def make_rows(count: int, days: int, seed: int = 0) -> list[Row]:
    """Rows in the order of time; items 10 to 12 are in no table."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, days * 48, count)) * 1800
    rows = []
    for i, time in enumerate(times.tolist()):
        clicked = int(rng.random() < 0.4)
        rows.append(Row(i, time, int(rng.integers(0, 6)), int(rng.integers(-1, 13)), clicked))
    return rows


def make_items(seed: int = 0, *, versions: int = 1, first_day: int = -2) -> list[Item]:
    """Items 0 to 9 in any order; many versions repeat the vector of the one before."""
    rng = np.random.default_rng(seed)
    items = []
    for number in range(10):
        # Few different ones, so that versions often have that of the one before.
        texts = rng.normal(size=(2, WIDTH)).astype(np.float32).tolist()
        images = rng.normal(size=(2, IMAGE_WIDTH)).astype(np.float16).tolist()
        starts = rng.choice(4 * 48, versions, replace=False) * 1800 + first_day * DAY
        for start in starts.tolist():
            text = () if rng.random() < 0.2 else tuple(texts[rng.integers(2)])
            image = () if rng.random() < 0.3 else tuple(images[rng.integers(2)])
            items.append(Item(number, start, round(float(rng.lognormal()), 2), text, image))
    return [items[i] for i in rng.permutation(len(items))]


def load_vector_spec(
    directory: Path, *, versions: str = "", more: str = "", label: str = ""
) -> FeatureSpec:
    """Write and load the spec."""
    file = directory / "spec.toml"
    file.write_text(SPEC.format(versions=versions, more=more, label=label))
    return load_spec(file)


def write_log(path: Path, rows: Sequence[Row]) -> None:
    """Write rows of the log as csv."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in dataclasses.fields(Row)])
        for row in rows:
            values = dataclasses.astuple(row)
            writer.writerow(["" if value == -1 else value for value in values])


def write_days(directory: Path, rows: Iterable[Row]) -> None:
    """Write a file for each day."""
    directory.mkdir(exist_ok=True)
    by_day: dict[int, list[Row]] = {}
    for row in rows:
        by_day.setdefault(row.time // DAY, []).append(row)
    for day, of_day in by_day.items():
        write_log(directory / f"day_{day}.csv", of_day)


def write_items(path: Path, items: Sequence[Item], *, fixed: bool = False) -> None:
    """Write items as the ending of the name says.

    Args:
        path: The file.
        items: The items.
        fixed: Of parquet, whether lists have a type of a fixed length.
    """
    records = [dataclasses.asdict(item) for item in items]
    if path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            for record in records:
                lists = {name: "|".join(map(repr, record[name])) for name in ("embedding", "image")}
                writer.writerow(record | lists)
        return
    for record in records:
        for name in ("embedding", "image"):
            record[name] = list(record[name]) or None
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return
    kinds = {"embedding": pa.list_(pa.float32()), "image": pa.list_(pa.float64())}
    if fixed:
        kinds = {
            "embedding": pa.list_(pa.float32(), WIDTH),
            "image": pa.list_(pa.float16(), IMAGE_WIDTH),
        }
    table = pa.table(
        {
            name: pa.array([record[name] for record in records], kinds.get(name))
            for name in records[0]
        }
    )
    pq.write_table(table, path, row_group_size=7)


def find_item(items: Sequence[Item], row: Row, *, delay: int | None) -> Item | None:
    """Return what is known of a row's item; with ``delay``, as of the time of the row."""
    known = [item for item in items if item.id == row.item]
    if delay is not None:
        known = [item for item in known if item.changed + delay < row.time]
    return max(known, key=lambda item: item.changed, default=None)


def expected_vectors(
    items: Sequence[Item], rows: Sequence[Row], *, delay: int | None
) -> np.ndarray:
    """Return ``dense_vectors`` of the rows, float32 [n, 7], as plain Python finds them."""
    expected = np.zeros((len(rows), WIDTH + 1 + IMAGE_WIDTH + 1), np.float32)
    for out, row in zip(expected, rows, strict=True):
        item = find_item(items, row, delay=delay)
        if item is not None and item.embedding:
            out[: WIDTH + 1] = *item.embedding, 1
        if item is not None and item.image:
            out[WIDTH + 1 :] = *np.array(item.image, np.float16).astype(np.float32), 1
    return expected


def read_rows(output: Path) -> pd.DataFrame:
    """Return the rows of all splits."""
    return pd.concat([read_split(output, split) for split in SPLITS], ignore_index=True)


def read_vectors(output: Path, rows: pd.DataFrame) -> np.ndarray:
    """Return ``dense_vectors`` of rows of an output."""
    splits = output / "criteo_binary/split"
    schema = TableSchema.read(splits)
    numbers = np.stack([rows[vector.pointer].to_numpy() for vector in schema.vectors])
    return VectorStores(splits / VECTORS, schema.vectors).take(numbers)


def assert_vectors(
    output: Path, rows: Sequence[Row], items: Sequence[Item], *, delay: int | None = None
) -> None:
    """Each row of the parquet, in the order of the log, leads to its vectors."""
    expected = expected_vectors(items, rows, delay=delay)
    found = read_rows(output)
    assert len(found) == len(rows)
    np.testing.assert_array_equal(read_vectors(output, found), expected)


def count_vectors(output: Path) -> list[int]:
    """How many vectors are stored."""
    splits = output / "criteo_binary/split"
    vectors = TableSchema.read(splits).vectors
    return [VectorStore(splits / VECTORS, vector).count for vector in vectors]
