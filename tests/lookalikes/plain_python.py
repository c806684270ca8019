"""What a shipped spec must make of the raw files of its log, in plain Python.

Each log has a reader of its own, written from the log's description, not from our specs and
readers.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Value = int | str | None


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the log; ``split`` has the splits in which it may be by its file."""

    label: int
    dense: tuple[float | None, ...]
    categories: tuple[Value, ...]
    split: tuple[str, ...] = ("train", "valid", "test")
    time: int = 0


@dataclasses.dataclass(frozen=True)
class Log:
    """The rows of a log in the order of its files, and how its columns become features.

    ``logarithm``: for each dense column whether ln(max(x, -2) + 3) is taken before it is
    standardized. ``threshold``: for each categorical column how often a value must be seen.
    ``split``: "order", "share", "time" or "files".
    """

    dense: list[str]
    categories: list[str]
    rows: list[Row]
    split: str
    logarithm: list[bool]
    threshold: list[int]


def _hex(text: str) -> int | None:
    return int(text, 16) if text else None


def _criteo_fields(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]


_INTS = [f"int_{j}" for j in range(13)]
_CATS = [f"cat_{j}" for j in range(26)]


def criteo_kaggle(path: Path) -> Log:
    rows = [
        Row(
            int(fields[0]),
            tuple(float(text) if text else None for text in fields[1:14]),
            tuple(map(_hex, fields[14:])),
        )
        for fields in _criteo_fields(path)
    ]
    return Log(_INTS, _CATS, rows, "order", [True] * 13, [10] * 26)


def criteo_x4(path: Path) -> Log:
    def bucket(text: str) -> int | None:
        if not text:
            return None
        number = int(text)
        return math.floor(math.log(number) ** 2) if number > 2 else number

    rows = [
        Row(int(fields[0]), (), (*map(bucket, fields[1:14]), *map(_hex, fields[14:])))
        for fields in _criteo_fields(path)
    ]
    return Log([], [*_INTS, *_CATS], rows, "share", [], [10] * 39)


def criteo_x1(path: Path) -> Log:
    rows = []
    for split in ("train", "valid", "test"):
        with open(path / f"{split}.csv") as file:
            for row in csv.DictReader(file):
                dense = tuple(float(row[f"I{j}"]) for j in range(1, 14))
                categories = tuple(int(row[f"C{j}"]) for j in range(1, 27))
                rows.append(Row(int(row["label"]), dense, categories, (split,)))
    names = [f"I{j}" for j in range(1, 14)], [f"C{j}" for j in range(1, 27)]
    return Log(*names, rows, "files", [False] * 13, [0] * 26)


def avazu(path: Path) -> Log:
    integers = ["C1", "banner_pos", "device_type", "device_conn_type"]
    hashes = ["site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"]
    hashes += ["device_id", "device_ip", "device_model"]
    numbered = [f"C{j}" for j in range(14, 22)]
    rows = []
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            time = datetime.datetime.strptime(row["hour"], "%y%m%d%H")
            rows.append(
                Row(
                    int(row["click"]),
                    (),
                    (
                        time.hour,
                        time.weekday(),
                        *(int(row[name]) for name in integers),
                        *(int(row[name], 16) for name in hashes),
                        *(int(row[name]) for name in numbered),
                    ),
                )
            )
    names = ["hour_of_day", "weekday", *integers, *hashes, *numbered]
    return Log([], names, rows, "share", [], [0, 0, *[2] * 21])


def _rating(user: str, movie: str, rating: str, seconds: str) -> Row:
    time = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    categories = (int(user), int(movie), time.hour, time.weekday())
    return Row(int(float(rating) >= 4), (), categories, time=int(seconds))


def movielens(path: Path) -> Log:
    rows = [_rating(*line.split("::")) for line in path.read_text().splitlines()]
    return Log([], ["user", "movie", "hour", "weekday"], rows, "time", [], [0] * 4)


def movielens_latest(path: Path) -> Log:
    rows = [_rating(*line.split(",")) for line in path.read_text().splitlines()[1:]]
    return Log([], ["userId", "movieId", "hour", "weekday"], rows, "time", [], [0] * 4)


def census(path: Path) -> Log:
    rows = []
    for name, splits in (("adult.data", ("train", "valid")), ("adult.test", ("test",))):
        for line in (path / name).read_text().splitlines():
            if not line or line.startswith("|"):
                continue
            fields = [None if text == "?" else text for text in line.split(", ")]
            dense = tuple(float(fields[j] or "nan") for j in (0, 4, 12, 10, 11))
            categories = tuple(fields[j] for j in (1, 3, 5, 6, 7, 8, 9, 13))
            label = {">50K": 1, ">50K.": 1, "<=50K": 0, "<=50K.": 0}[fields[14] or ""]
            rows.append(Row(label, dense, categories, splits))
    dense_names = ["age", "education_num", "hours_per_week", "capital_gain", "capital_loss"]
    names = ["workclass", "education", "marital_status", "occupation", "relationship", "race"]
    names += ["sex", "native_country"]
    return Log(dense_names, names, rows, "files", [False] * 3 + [True] * 2, [0] * 8)


READERS: dict[str, Callable[[Path], Log]] = {
    "criteo_kaggle": criteo_kaggle,
    "criteo_x4": criteo_x4,
    "criteo_x1": criteo_x1,
    "avazu": avazu,
    "movielens": movielens,
    "movielens_latest": movielens_latest,
    "census": census,
}

NULL_ID, OOV_ID, FIRST_ID = 1, 2, 3


def vocabularies(log: Log, train: list[Row]) -> list[dict[Value, int]]:
    """Return the id of each value: by falling frequency, ties by value."""
    result = []
    for j, threshold in enumerate(log.threshold):
        counts = Counter(row.categories[j] for row in train)
        counts.pop(None, None)
        kept = [value for value in counts if counts[value] >= threshold]
        if kept and isinstance(kept[0], str):
            kept.sort(key=lambda value: (-counts[value], str(value).encode()))
        else:  # -1 comes behind all others: values are compared as unsigned integers
            kept.sort(key=lambda value: (-counts[value], int(value or 0) % 2**64))
        result.append({value: FIRST_ID + i for i, value in enumerate(kept)})
    return result


def encode(row: Row, ids: list[dict[Value, int]]) -> tuple[int, ...]:
    """Return the ids of a row."""
    return tuple(
        NULL_ID if value is None else own.get(value, OOV_ID)
        for value, own in zip(row.categories, ids, strict=True)
    )


def dense_columns(log: Log, rows: list[Row], train: list[Row]) -> list[list[float]]:
    """Return the dense columns of rows, standardized with mean and deviation over ``train``."""
    result = []
    for j, logarithm in enumerate(log.logarithm):

        def value(row: Row, j: int = j, logarithm: bool = logarithm) -> float:
            number = row.dense[j]
            number = 0.0 if number is None else number
            return math.log(max(number, -2.0) + 3.0) if logarithm else number

        fitted = [value(row) for row in train]
        mean = math.fsum(fitted) / len(fitted)
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in fitted) / (len(fitted) - 1))
        result.append([(value(row) - mean) / (deviation or 1.0) for row in rows])
    return result
