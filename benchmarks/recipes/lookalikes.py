"""Small synthetic files that look like public logs as they are published, quirks included.

The values are random; whether a row is positive depends on them, so that a model can learn
something. Nothing here says anything about the real logs but how their files are written.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

#: A row as the texts of its fields, without the label; the sum of the effects of its values.
Row = tuple[list[str], float]


def _effect(column: str, value: str, size: float) -> float:
    """Return how much a value changes the logit: between -size and size, always the same."""
    return size * (zlib.crc32(f"{column}={value}".encode()) / 2**31 - 1)


def _clicks(rows: Sequence[Row], rng: np.random.Generator, share: float) -> list[int]:
    """Return labels of which about ``share`` are 1."""
    effects = np.array([effect for _, effect in rows])
    threshold = math.log(share / (1 - share)) - effects.mean()
    return (rng.random(len(rows)) < 1 / (1 + np.exp(-effects - threshold))).astype(int).tolist()


def _zipf(rng: np.random.Generator, values: int, rows: int) -> np.ndarray:
    """Return random numbers below ``values``, the small ones more often."""
    weights = 1 / np.arange(1, values + 1)
    return rng.choice(values, size=rows, p=weights / weights.sum())


def _hash(column: str, value: object) -> str:
    return f"{zlib.crc32(f'{column}:{value}'.encode()):08x}"


def criteo(directory: Path, rows: int, seed: int) -> Path:
    """Write train.txt of Criteo's Kaggle challenge; return its path."""
    rng = np.random.default_rng(seed)
    counts = np.stack([rng.geometric(1 / (2 + 3 * j), rows) - 1 for j in range(13)])
    counts[1] -= 3  # the second count may be negative
    drawn = np.stack([_zipf(rng, 3 + 12 * (j % 9), rows) for j in range(26)])
    no_count, no_category = rng.random((13, rows)) < 0.2, rng.random((26, rows)) < 0.1
    made: list[Row] = []
    for i in range(rows):
        fields = ["" if no_count[j, i] else str(counts[j, i]) for j in range(13)]
        fields += ["" if no_category[j, i] else _hash(f"C{j}", drawn[j, i]) for j in range(26)]
        effect = sum(_effect(f"C{j}", fields[13 + j], 1.0) for j in range(8))
        made.append((fields, effect + 0.3 * math.log1p(max(counts[5, i], 0))))
    labels = _clicks(made, rng, 0.26)
    path = directory / "train.txt"
    lines = ("\t".join([str(y), *fields]) for y, (fields, _) in zip(labels, made, strict=True))
    _write(path, lines)
    return path


def criteo_x1(directory: Path, rows: int, seed: int) -> Path:
    """Write train.csv, valid.csv and test.csv of BARS' Criteo_x1, 7:2:1; return the directory."""
    rng = np.random.default_rng(seed)
    scaled = np.round(rng.beta(1, 12, (13, rows)), 6)
    drawn = np.stack([_zipf(rng, 3 + 12 * (j % 9), rows) for j in range(26)])
    first = np.cumsum([0, *(3 + 12 * (j % 9) for j in range(25))])  # numbered over all columns
    made: list[Row] = []
    for i in range(rows):
        fields = [f"{scaled[j, i]:g}" for j in range(13)]
        fields += [str(1 + first[j] + drawn[j, i]) for j in range(26)]
        effect = sum(_effect(f"C{j}", fields[13 + j], 1.0) for j in range(8))
        made.append((fields, effect + 4 * scaled[2, i]))
    labels = _clicks(made, rng, 0.26)
    header = ["label", *(f"I{j}" for j in range(1, 14)), *(f"C{j}" for j in range(1, 27))]
    lines = [f"{y},{','.join(fields)}" for y, (fields, _) in zip(labels, made, strict=True)]
    cuts = {"train": (0, 0.7), "valid": (0.7, 0.9), "test": (0.9, 1)}
    for name, (begin, end) in cuts.items():
        part = lines[round(begin * rows) : round(end * rows)]
        _write(directory / f"{name}.csv", [",".join(header), *part])
    return directory


def criteo_1tb(directory: Path, rows: int, seed: int) -> Path:
    """Write day_0 … day_3 of Criteo's 1 TB log; return the directory."""
    lines = criteo(directory, rows, seed).read_text().splitlines()
    (directory / "train.txt").unlink()
    for day in range(4):
        _write(directory / f"day_{day}", lines[day * rows // 4 : (day + 1) * rows // 4])
    return directory


#: Avazu's columns behind id, click and hour: how many values, and the smallest one of integers.
_AVAZU = {
    **{"C1": (7, 1001), "banner_pos": (7, 0), "site_id": (200, None), "site_domain": (150, None)},
    **{"site_category": (20, None), "app_id": (150, None), "app_domain": (30, None)},
    **{"app_category": (20, None), "device_id": (300, None), "device_ip": (900, None)},
    **{"device_model": (300, None), "device_type": (5, 0), "device_conn_type": (4, 0)},
    **{"C14": (300, 375), "C15": (8, 120), "C16": (9, 20), "C17": (100, 112), "C18": (4, 0)},
    **{"C19": (50, 33), "C20": (100, 100000), "C21": (50, 1)},
}


def avazu(directory: Path, rows: int, seed: int, name: str = "train.gz") -> Path:
    """Write Avazu's train.gz, or train.csv; return its path."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(2**40, 2**64, rows, dtype=np.uint64)
    hours = np.sort(rng.integers(0, 240, rows))
    drawn = {column: _zipf(rng, values, rows) for column, (values, _) in _AVAZU.items()}
    made: list[Row] = []
    for i in range(rows):
        hour = f"1410{21 + hours[i] // 24:02d}{hours[i] % 24:02d}"
        fields = [hour]
        for column, (_, least) in _AVAZU.items():
            value = drawn[column][i]
            if column == "C20" and value % 3 == 0:
                fields.append("-1")
            else:
                fields.append(_hash(column, value) if least is None else str(least + value))
        effect = _effect("hour", hour[6:], 0.8) + sum(
            _effect(column, fields[1 + j], 1.2)
            for j, column in enumerate(_AVAZU)
            if column in ("banner_pos", "site_category", "app_category", "C15", "C18", "C21")
        )
        made.append((fields, effect))
    labels = _clicks(made, rng, 0.17)
    lines = [",".join(["id", "click", "hour", *_AVAZU])]
    for i, (fields, _) in enumerate(made):
        lines.append(",".join([str(ids[i]), str(labels[i]), *fields]))
    path = directory / name
    _write(path, lines)
    return path


def _ratings(rows: int, seed: int) -> list[tuple[int, int, int, int]]:
    """Return users, movies, ratings in half stars from 1 to 10, and times, sorted by user."""
    rng = np.random.default_rng(seed)
    users, movies = 1 + _zipf(rng, 300, 4 * rows), 1 + _zipf(rng, 900, 4 * rows)
    drawn = zip(users.tolist(), (movies + movies // 5).tolist(), strict=True)
    pairs = list(dict.fromkeys(drawn))[:rows]  # a user rates a movie once
    times = 956_703_932 + rng.choice(90_000_000, rows, replace=False)
    made = []
    for (user, movie), time in zip(pairs, times.tolist(), strict=True):
        taste = _effect("user", str(user), 3.0) + _effect("movie", str(movie), 3.0)
        stars = min(10, max(1, round(7 + taste + rng.normal(0, 1.2))))
        made.append((user, movie, stars, time))
    return sorted(made, key=lambda row: row[0])


def movielens(directory: Path, rows: int, seed: int) -> Path:
    """Write ratings.dat of MovieLens 1M; return its path."""
    path = directory / "ratings.dat"
    ratings = _ratings(rows, seed)
    _write(path, (f"{u}::{m}::{(stars + 1) // 2}::{time}" for u, m, stars, time in ratings))
    return path


def movielens_latest(directory: Path, rows: int, seed: int) -> Path:
    """Write ratings.csv of MovieLens latest, with half stars; return its path."""
    path = directory / "ratings.csv"
    lines = [f"{u},{m},{stars / 2},{time}" for u, m, stars, time in _ratings(rows, seed)]
    _write(path, ["userId,movieId,rating,timestamp", *lines])
    return path


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


def census(directory: Path, rows: int, seed: int) -> Path:
    """Write adult.data and, half as large, adult.test; return the directory."""
    rng = np.random.default_rng(seed)
    total = rows + rows // 2
    drawn = {name: _zipf(rng, len(values), total) for name, values in _CENSUS.items()}
    made: list[Row] = []
    for i in range(total):
        text = {name: values[drawn[name][i]] for name, values in _CENSUS.items()}
        age, years = int(rng.integers(17, 91)), int(rng.integers(1, 17))
        gain = int(rng.choice([0, 0, 0, 0, 2174, 7688, 99999]))
        effect = 0.15 * (years - 8) + 0.8 * (gain > 5000)
        effect += sum(_effect(name, value, 1.2) for name, value in text.items())
        text |= {name: "?" for name in _MAY_MISS if rng.random() < 0.06}
        fields = [str(age), text["workclass"], str(int(rng.integers(12_285, 1_484_705)))]
        fields += [text["education"], str(years), text["marital_status"], text["occupation"]]
        fields += [text["relationship"], text["race"], text["sex"], str(gain)]
        fields += [str(int(rng.choice([0, 0, 0, 1902]))), str(int(rng.integers(1, 100)))]
        made.append(([*fields, text["native_country"]], effect))
    labels = [">50K" if y else "<=50K" for y in _clicks(made, rng, 0.24)]
    lines = [", ".join([*fields, y]) for y, (fields, _) in zip(labels, made, strict=True)]
    _write(directory / "adult.data", [*lines[:rows], ""])
    test = [f"{line}." for line in lines[rows:]]
    _write(directory / "adult.test", ["|1x3 Cross validator", *test, ""])
    return directory


#: By the name of the shipped spec: what writes a look-alike of its log, and returns what is passed
#: as --input_path.
LOOKALIKES: dict[str, Callable[[Path, int, int], Path]] = {
    "criteo_1tb": criteo_1tb,
    "criteo_kaggle": criteo,
    "criteo_x4": criteo,
    "criteo_x1": criteo_x1,
    "avazu": avazu,
    "movielens": movielens,
    "movielens_latest": movielens_latest,
    "census": census,
}


def _write(path: Path, lines: Iterator[str] | Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)
