"""Small files in the formats of public logs, quirks included, and the values that are in them.

The values are random. Whether a row is positive depends on a few of its values, so that a model can
learn something.
"""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import math
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

Value = int | str | float | None


@dataclasses.dataclass(frozen=True)
class Log:
    """The files of a log and what its shipped spec must read from them.

    Attributes:
        path: What is passed as ``--input_path``.
        labels: The label of each row, in the order of the files.
        dense: The values of each dense column before the spec's transform.
        categorical: The values of each categorical column, None where missing.
        threshold: How often a value must occur to get an id of its own.
        sizes: Rows of train, valid and test if these are cut in the order of the files.
    """

    path: Path
    labels: list[int]
    dense: dict[str, list]
    categorical: dict[str, list]
    threshold: int = 0
    sizes: tuple[int, ...] = ()


def _zipf(rng: np.random.Generator, values: int, rows: int) -> np.ndarray:
    """Return random numbers below ``values``, the small ones more often."""
    weights = 1 / np.arange(1, values + 1)
    return rng.choice(values, size=rows, p=weights / weights.sum())


def _labels(rng: np.random.Generator, *columns: np.ndarray) -> list[int]:
    """Return labels that are 1 more often where the values' numbers are odd."""
    odd = np.mean([column % 2 for column in columns], axis=0)
    return (rng.random(len(odd)) < 0.05 + 0.5 * odd).astype(int).tolist()


def _hashes(name: str, drawn: np.ndarray) -> list[int]:
    return [zlib.crc32(f"{name}:{value}".encode()) for value in drawn]


def _texts(values: Iterable[Value], form: str = "") -> list[str]:
    return ["" if value is None else format(value, form) for value in values]


def _write(path: Path, columns: Iterable[list[str]], separator: str, header: str = "") -> None:
    lines = [header] if header else []
    lines += [separator.join(row) for row in zip(*columns, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _criteo(rows: int, seed: int) -> tuple[list[int], dict[str, list], dict[str, list]]:
    rng = np.random.default_rng(seed)

    def with_gaps(values: Iterable[int], share: float) -> list[int | None]:
        missing = rng.random(rows) < share
        return [None if gap else int(value) for value, gap in zip(values, missing, strict=True)]

    drawn = [_zipf(rng, 3 + 12 * (j % 9), rows) for j in range(26)]
    labels = _labels(rng, *drawn[:3])
    counts = {  # those of the second column may be negative
        f"int_{j}": with_gaps(rng.geometric(1 / (2 + 3 * j), rows) - (4 if j == 1 else 1), 0.2)
        for j in range(13)
    }
    hashes = {f"cat_{j}": with_gaps(_hashes(f"C{j}", drawn[j]), 0.1) for j in range(26)}
    return labels, counts, hashes


def criteo_1tb(directory: Path, rows: int, seed: int, days: int = 4) -> Log:
    """Write day_0 … day_3 of Criteo's 1 TB log."""
    labels, counts, hashes = _criteo(rows, seed)
    columns = [_texts(labels), *map(_texts, counts.values())]
    columns += [_texts(values, "08x") for values in hashes.values()]
    for day in range(days):
        part = slice(day * rows // days, (day + 1) * rows // days)
        _write(directory / f"day_{day}", [column[part] for column in columns], "\t")
    return Log(directory, labels, counts, hashes)


def criteo_kaggle(directory: Path, rows: int, seed: int) -> Log:
    """Write train.txt of Criteo's Kaggle challenge."""
    log = criteo_1tb(directory, rows, seed, days=1)
    path = (directory / "day_0").rename(directory / "train.txt")
    sizes = (rows * 8 // 10, rows // 10, rows // 10)
    return dataclasses.replace(log, path=path, threshold=10, sizes=sizes)


def criteo_x4(directory: Path, rows: int, seed: int) -> Log:
    """Write the same file, which the spec reads with logarithms of counts as categories."""

    def bucket(count: int | None) -> int | None:
        return math.floor(math.log(count) ** 2) if count is not None and count > 2 else count

    log = criteo_kaggle(directory, rows, seed)
    buckets = {name: list(map(bucket, values)) for name, values in log.dense.items()}
    return dataclasses.replace(log, dense={}, categorical=buckets | log.categorical, sizes=())


def criteo_x1(directory: Path, rows: int, seed: int) -> Log:
    """Write train.csv, valid.csv and test.csv of BARS' Criteo_x1, 7:2:1."""
    rng = np.random.default_rng(seed)
    drawn = [_zipf(rng, 3 + 12 * (j % 9), rows) for j in range(26)]
    labels = _labels(rng, *drawn[:3])
    dense = {f"I{j + 1}": np.round(rng.beta(1, 12, rows), 6).tolist() for j in range(13)}
    first = np.cumsum([0, *(3 + 12 * (j % 9) for j in range(25))])  # numbered over all columns
    categories = {f"C{j + 1}": (1 + first[j] + drawn[j]).tolist() for j in range(26)}
    columns = [_texts(labels), *(_texts(values, "g") for values in dense.values())]
    columns += map(_texts, categories.values())
    header = ",".join(["label", *dense, *categories])
    sizes = (rows * 7 // 10, rows * 2 // 10, rows - rows * 9 // 10)
    begin = 0
    for name, size in zip(("train", "valid", "test"), sizes, strict=True):
        part = [column[begin : begin + size] for column in columns]
        _write(directory / f"{name}.csv", part, ",", header)
        begin += size
    return Log(directory, labels, dense, categories, sizes=sizes)


#: Avazu's columns behind id, click and hour: how many values, and the smallest one of integers.
_AVAZU = {
    **{"C1": (7, 1001), "banner_pos": (7, 0), "site_id": (200, None), "site_domain": (150, None)},
    **{"site_category": (20, None), "app_id": (150, None), "app_domain": (30, None)},
    **{"app_category": (20, None), "device_id": (300, None), "device_ip": (900, None)},
    **{"device_model": (300, None), "device_type": (5, 0), "device_conn_type": (4, 0)},
    **{"C14": (300, 375), "C15": (8, 120), "C16": (9, 20), "C17": (100, 112), "C18": (4, 0)},
    **{"C19": (50, 33), "C20": (100, 100000), "C21": (50, 1)},
}


def avazu(directory: Path, rows: int, seed: int) -> Log:
    """Write Avazu's train.gz."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(2**40, 2**64, rows, dtype=np.uint64)
    times = [divmod(int(hour), 24) for hour in np.sort(rng.integers(0, 240, rows))]
    drawn = {name: _zipf(rng, count, rows) for name, (count, _) in _AVAZU.items()}
    labels = _labels(rng, drawn["banner_pos"], drawn["site_category"], drawn["C15"])
    values, columns = {}, [list(map(str, ids)), _texts(labels)]
    columns.append([f"1410{21 + day}{hour:02d}" for day, hour in times])
    for name, (_, minimum) in _AVAZU.items():
        values[name] = _hashes(name, drawn[name])
        if minimum is not None:
            values[name] = (minimum + drawn[name]).tolist()
        if name == "C20":
            values[name] = [-1 if value % 3 == 0 else value for value in values[name]]
        columns.append(_texts(values[name], "08x" if minimum is None else ""))
    path = directory / "train.gz"
    _write(path, columns, ",", ",".join(["id", "click", "hour", *_AVAZU]))
    values["hour_of_day"] = [hour for _, hour in times]
    values["weekday"] = [datetime.date(2014, 10, 21 + day).weekday() for day, _ in times]
    return Log(path, labels, {}, values, threshold=2)


def movielens(directory: Path, rows: int, seed: int, *, latest: bool = False) -> Log:
    """Write ratings.dat of MovieLens 1M, or ratings.csv of the latest one, with half stars."""
    rng = np.random.default_rng(seed)
    users, movies = 1 + _zipf(rng, 300, 4 * rows), 1 + _zipf(rng, 900, 4 * rows)
    pairs = dict.fromkeys(zip(users.tolist(), (movies + movies // 5).tolist(), strict=True))
    users, movies = np.array(sorted(list(pairs)[:rows])).T  # a user rates a movie once
    seconds = (956_703_932 + rng.choice(90_000_000, rows, replace=False)).tolist()
    liked = np.array(_labels(rng, users, movies))
    stars = np.where(liked, rng.integers(8, 11, rows), rng.integers(1, 8, rows)) / 2
    times = [datetime.datetime.fromtimestamp(second, datetime.UTC) for second in seconds]
    names = ("userId", "movieId") if latest else ("user", "movie")
    values = dict(zip(names, (users.tolist(), movies.tolist()), strict=True))
    ratings = _texts(stars.tolist() if latest else np.floor(stars).astype(int).tolist())
    columns = [*map(_texts, values.values()), ratings, _texts(seconds)]
    path = directory / ("ratings.csv" if latest else "ratings.dat")
    header = "userId,movieId,rating,timestamp" if latest else ""
    _write(path, columns, "," if latest else "::", header)
    values |= {"hour": [t.hour for t in times], "weekday": [t.weekday() for t in times]}
    return Log(path, liked.tolist(), {}, values)


def movielens_latest(directory: Path, rows: int, seed: int) -> Log:
    """Write ratings.csv of MovieLens latest."""
    return movielens(directory, rows, seed, latest=True)


_CENSUS = {
    "workclass": ["Private", "Self-emp-not-inc", "Local-gov", "State-gov", "Without-pay"],
    "education": ["HS-grad", "Some-college", "Bachelors", "Masters", "11th", "Doctorate"],
    "marital_status": ["Married-civ-spouse", "Never-married", "Divorced", "Widowed"],
    "occupation": ["Craft-repair", "Exec-managerial", "Sales", "Tech-support", "Armed-Forces"],
    "relationship": ["Husband", "Not-in-family", "Own-child", "Wife"],
    "race": ["White", "Black", "Amer-Indian-Eskimo"],
    "sex": ["Male", "Female"],
    "native_country": ["United-States", "Mexico", "Outlying-US(Guam-USVI-etc)", "Trinadad&Tobago"],
}
_MAY_MISS = ("workclass", "occupation", "native_country")


def census(directory: Path, rows: int, seed: int) -> Log:
    """Write adult.data and, half as large, adult.test."""
    rng = np.random.default_rng(seed)
    total = rows + rows // 2
    drawn = {name: _zipf(rng, len(texts), total) for name, texts in _CENSUS.items()}
    labels = _labels(rng, drawn["education"], drawn["occupation"], drawn["relationship"])
    categories = {name: [_CENSUS[name][i] for i in drawn[name]] for name in _CENSUS}
    for name in _MAY_MISS:
        for i in np.flatnonzero(rng.random(total) < 0.06):
            categories[name][i] = None
    dense = {
        "age": rng.integers(17, 91, total).tolist(),
        "education_num": rng.integers(1, 17, total).tolist(),
        "hours_per_week": rng.integers(1, 100, total).tolist(),
        "capital_gain": rng.choice([0, 0, 0, 0, 2174, 7688, 99999], total).tolist(),
        "capital_loss": rng.choice([0, 0, 0, 1902], total).tolist(),
    }
    texts = {name: ["?" if v is None else str(v) for v in values]
             for name, values in (dense | categories).items()}  # fmt: skip
    texts["fnlwgt"] = _texts(rng.integers(12_285, 1_484_705, total).tolist())
    order = ["age", "workclass", "fnlwgt", "education", "education_num", "marital_status"]
    order += ["occupation", "relationship", "race", "sex", "capital_gain", "capital_loss"]
    columns = [texts[name] for name in [*order, "hours_per_week", "native_country"]]
    columns.append([">50K" if label else "<=50K" for label in labels])
    _write(directory / "adult.data", [column[:rows] for column in columns], ", ")
    columns[-1] = [f"{text}." for text in columns[-1]]
    part = [column[rows:] for column in columns]
    _write(directory / "adult.test", part, ", ", "|1x3 Cross validator")
    for name in ("adult.data", "adult.test"):
        with open(directory / name, "a") as file:
            file.write("\n")
    return Log(directory, labels, dense, categories)


#: By the name of the shipped spec.
LOGS: dict[str, Callable[[Path, int, int], Log]] = {
    "criteo_1tb": criteo_1tb,
    "criteo_kaggle": criteo_kaggle,
    "criteo_x4": criteo_x4,
    "criteo_x1": criteo_x1,
    "avazu": avazu,
    "movielens": movielens,
    "movielens_latest": movielens_latest,
    "census": census,
}
