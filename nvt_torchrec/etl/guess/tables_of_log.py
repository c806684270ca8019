"""Join a table to a guessed spec: find its key in the log, and choose its features."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.names import is_code, split_words
from nvt_torchrec.etl.guess.roles import Feature, Guess, choose_features, rename_features
from nvt_torchrec.etl.guess.sample import SampledFile
from nvt_torchrec.etl.guess.values import Profile

#: Minimum share of the log's rows whose key is in the table.
_MIN_FOUND = 0.5
#: Minimum share if only a part of the table was read.
_MIN_FOUND_IN_PART = 0.01
#: Minimum number of rows to judge whether a string column says more than the key.
_MIN_ROWS = 100
#: Minimum mean count of the values of a string column that says more than the key.
_MIN_MEAN_COUNT = 1.1
#: The keys of ``[input]`` of tab-separated text with a header.
_TSV = {"header": True}


@dataclasses.dataclass(frozen=True)
class GuessedTable:
    """A table of a spec.

    Attributes:
        keys: The keys of its ``[[table]]`` block.
        why: The comment above the block.
    """

    keys: dict[str, Any]
    why: str


@dataclasses.dataclass(frozen=True)
class _Key:
    """The columns by which a table is joined to the log.

    Attributes:
        column: The column of the log.
        own: The column of the table.
        time: The column of the table with the time of a version; None if each key has one row.
        found: The share of the log's rows whose key is in the table.
    """

    column: Profile
    own: Profile
    time: Profile | None
    found: float


def add_table(
    found: Guess, log: SampledFile, table: SampledFile, path: str
) -> tuple[Guess, GuessedTable]:
    """Return a guess with the columns of a table.

    Args:
        found: The guess of the log.
        log: Rows of the log.
        table: Rows of the table.
        path: The file of the table.

    Raises:
        BadInputError: The table's columns have no names, or none of them is a key of the log.
    """
    if table.positional:
        raise BadInputError(
            f"{path}: its columns have no names", "write them into the first line of the file"
        )
    sources = {feature.source for feature in found.features}
    read = [column for column in log.columns if column.source in sources]
    min_found = _MIN_FOUND if table.whole else _MIN_FOUND_IN_PART
    key = _find_key(read, table.columns, min_found)
    if key is None:
        raise BadInputError(
            f"{path}: no column of it has the values of a column of the log, each in only one row",
            "pass a table with a key, or write the [[table]] by hand as docs/tables.md shows",
        )
    if key.time is not None and found.time is None:
        raise BadInputError(
            f"{path}: keys have several rows with different {key.time.name}, but the log has no "
            "time to choose one by",
            "keep only the newest row of each key",
        )
    name = _make_table_name(path)
    used = {key.own.source}
    if key.time:
        used.add(key.time.source)
    features: list[Feature] = []
    unread = dict(found.unread)
    for column in table.columns:
        if column.source in used:
            continue
        if _is_nearly_unique(column):
            unread[f"{name}: {column.name}"] = "nearly every row has another value, like the key"
            continue
        chosen = [_make_vector(column)] if column.width else choose_features(column, table)
        if isinstance(chosen, str):
            unread[f"{name}: {column.name}"] = chosen
            continue
        for feature in chosen:
            options = {**feature.options, "table": name}
            features.append(dataclasses.replace(feature, options=options))
    taken = [rule["name"] for rule, _ in found.labels]
    taken += [feature.name for feature in found.features]
    features = [*found.features, *rename_features(features, taken)]
    features.sort(key=lambda feature: ["dense", "categorical", "vector"].index(feature.kind))
    guess = dataclasses.replace(found, features=features, unread=unread)
    keys = _make_block_keys(name, key, table, path)
    if key.time is not None and found.time is not None:
        keys["log_time"] = found.time.source
        if found.time.time_format:
            keys["log_time_format"] = found.time.time_format
    return guess, GuessedTable(keys, _explain(key))


def _make_vector(column: Profile) -> Feature:
    """Return the vector feature of a column of lists of numbers."""
    options: dict[str, Any] = {"width": column.width}
    if column.half:
        options["dtype"] = "float16"
    why = f"lists of {column.width} numbers"
    if column.missing:
        why += f", missing in {column.missing / column.rows:.1%} of the rows"
    return Feature(column.name, "vector", options, why, column.source)


def _find_key(log: list[Profile], table: list[Profile], min_found: float) -> _Key | None:
    """Find the key by which to join a table; prefer equal names, then the most rows found.

    Args:
        log: The columns of the log that may be keys.
        table: The columns of the table.
        min_found: Minimum share of the log's rows whose key must be in the table.
    """
    best: tuple[tuple[bool, float, int], _Key] | None = None
    for own in table:
        time = _find_version_time(own, table)
        if own.multi_hot or own.missing or (own.distinct < own.rows and time is None):
            continue
        for column in log:
            if column.multi_hot or (column.kind == "int") != (own.kind == "int"):
                continue
            share = _find_share(column.counts, own.counts)
            if share < min_found or not _may_be_key(column, own):
                continue
            same_word = split_words(column.name)[:1] == split_words(own.name)[:1]
            rank = (same_word, share, column.distinct)
            if best is None or rank > best[0]:
                best = rank, _Key(column, own, time, share)
    return best[1] if best else None


def _is_nearly_unique(column: Profile) -> bool:
    """Return True if a string column, such as one of titles, says no more than the key."""
    is_text = column.kind in ("string", "hex32") and not column.multi_hot
    return is_text and column.present >= _MIN_ROWS and column.mean_count < _MIN_MEAN_COUNT


def _may_be_key(column: Profile, own: Profile) -> bool:
    """Return True if a column of the log may be the key of the table.

    Integers need a name that says so: small quantities have the same values as row numbers.
    """
    same_name = column.name.lower() == own.name.lower()
    return column.kind != "float" and (same_name or column.kind != "int" or is_code(column.name))


def _find_version_time(own: Profile, table: list[Profile]) -> Profile | None:
    """Return the time column in which rows of the same key differ.

    It is None if each key has one row, or no time tells the rows of a key apart.
    """
    for column in table:
        if column is own or column.kind != "time":
            continue
        pairs = np.stack([own.codes, column.codes])
        if np.unique(pairs, axis=1).shape[1] == own.rows:
            return None if own.distinct == own.rows else column
    return None


def _find_share(log: Counter[str], table: Counter[str]) -> float:
    """Return the share of the log's rows whose value a table has."""
    num_found = sum(count for value, count in log.items() if value in table)
    return num_found / max(log.total(), 1)


def _make_table_name(path: str) -> str:
    """Return the name of a table, made from the name of its file."""
    stem = path.rstrip("/").rsplit("/", 1)[-1].split(".", 1)[0]
    name = re.sub(r"\W", "_", stem)
    return name if name.isidentifier() else f"table_{name}"


def _make_block_keys(name: str, key: _Key, table: SampledFile, path: str) -> dict[str, Any]:
    """Return the keys of the ``[[table]]`` block, without those about the log's time."""
    keys: dict[str, Any] = {"name": name, "path": path.rstrip("/").rsplit("/", 1)[-1]}
    keys["key"] = key.column.source
    if key.own.source != key.column.source:
        keys["key"] = {key.column.source: key.own.source}
    if key.time is not None:
        keys["valid_from"] = key.time.source
        if key.time.time_format:
            keys["time_format"] = key.time.time_format
    if table.input != {"format": path.rsplit(".", 1)[-1]} and table.input != _TSV:
        keys["input"] = table.input
    return keys


def _explain(key: _Key) -> str:
    """Return the comment above the block of a table."""
    why = f"it has the {key.column.name} of {key.found:.1%} of the log's rows"
    if key.time is not None:
        return f"{why}; a version applies to rows later than its {key.time.name}"
    return f"{why}; it should hold nothing that was learned after a row, see docs/tables.md"
