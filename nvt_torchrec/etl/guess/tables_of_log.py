"""Which column of a log is the key of a table, and what the table's columns are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.names import is_code, split_words
from nvt_torchrec.etl.guess.roles import Feature, Guess, choose_features, rename_features
from nvt_torchrec.etl.guess.sample import SampledFile
from nvt_torchrec.etl.guess.values import Profile

#: The least share of the rows of the log whose key the table has.
_MIN_FOUND = 0.5
#: The least share where only a part of the table was read.
_MIN_FOUND_IN_PART = 0.01
#: With fewer rows it is not known whether a text says more than the key.
_MIN_ROWS = 100
#: How often a text occurs on average, at least, to say more than the key.
_MIN_OFTEN = 1.1
#: The keys of ``[input]`` of tab-separated text with a header.
_TSV = {"header": True}


@dataclasses.dataclass(frozen=True)
class GuessedTable:
    """A table of a spec.

    Attributes:
        keys: The keys of its block.
        why: The comment.
    """

    keys: dict[str, Any]
    why: str


@dataclasses.dataclass(frozen=True)
class _Key:
    """How a table is joined to the log.

    Attributes:
        column: The column of the log.
        own: The column of the table.
        time: The time of a version; None if each key has one row.
        found: The share of the log's rows whose key is there.
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
        BadInputError: The table has no names, or no key that the log has.
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
            f"{path}: no column of it has the values of one of the log, each in one row",
            "pass a table with a key, or write the [[table]] by hand as docs/tables.md shows",
        )
    if key.time is not None and found.time is None:
        raise BadInputError(
            f"{path}: several rows of a key, by {key.time.name}, and rows of the log have no time",
            "keep the newest row of each key",
        )
    name = _table_name(path)
    used = {key.own.source}
    if key.time:
        used.add(key.time.source)
    features: list[Feature] = []
    unread = dict(found.unread)
    for column in table.columns:
        if column.source in used:
            continue
        made = [_make_vector(column)] if column.width else choose_features(column, table)
        if _names_each_row(column):
            made = "nearly each row has a value of its own, as it has a key"
        if isinstance(made, str):
            unread[f"{name}: {column.name}"] = made
            continue
        for feature in made:
            options = {**feature.options, "table": name}
            features.append(dataclasses.replace(feature, options=options))
    taken = [rule["name"] for rule, _ in found.labels]
    taken += [feature.name for feature in found.features]
    features = [*found.features, *rename_features(features, taken)]
    features.sort(key=lambda feature: ["dense", "categorical", "vector"].index(feature.kind))
    guess = dataclasses.replace(found, features=features, unread=unread)
    keys = _block_keys(name, key, table, path)
    if key.time is not None and found.time is not None:
        keys["log_time"] = found.time.source
        if found.time.time_format:
            keys["log_time_format"] = found.time.time_format
    return guess, GuessedTable(keys, _explain(key))


def _make_vector(column: Profile) -> Feature:
    """Return the vector that lists of numbers of one length become."""
    options: dict[str, Any] = {"width": column.width}
    if column.half:
        options["dtype"] = "float16"
    why = f"lists of {column.width} numbers"
    if column.missing:
        why += f", missing in {column.missing / column.rows:.1%} of the rows"
    return Feature(column.name, "vector", options, why, column.source)


def _find_key(log: list[Profile], table: list[Profile], min_found: float) -> _Key | None:
    """Return the key that most rows of the log have, one of the same name before others.

    Args:
        log: The columns of the log that may be keys.
        table: The columns of the table.
        min_found: The least share of the rows of the log that have it.
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


def _names_each_row(column: Profile) -> bool:
    """Return whether a column of texts, such as titles, says no more than the key."""
    is_text = column.kind in ("string", "hex32") and not column.multi_hot
    return is_text and column.present >= _MIN_ROWS and column.often < _MIN_OFTEN


def _may_be_key(column: Profile, own: Profile) -> bool:
    """Return whether a column may be a key: small quantities have the values of any row number."""
    same_name = column.name.lower() == own.name.lower()
    return column.kind != "float" and (same_name or column.kind != "int" or is_code(column.name))


def _find_version_time(own: Profile, table: list[Profile]) -> Profile | None:
    """Return the time by which rows of the same key differ; None if there is none."""
    for column in table:
        if column is own or column.kind != "time":
            continue
        pairs = np.stack([own.codes, column.codes])
        if np.unique(pairs, axis=1).shape[1] == own.rows:
            return None if own.distinct == own.rows else column
    return None


def _find_share(log: Counter[str], table: Counter[str]) -> float:
    """Return the share of the log's values, as often as they occur, that a table has."""
    num_found = sum(count for value, count in log.items() if value in table)
    return num_found / max(log.total(), 1)


def _table_name(path: str) -> str:
    """Return the name of a table by that of its file."""
    stem = path.rstrip("/").rsplit("/", 1)[-1].split(".", 1)[0]
    name = "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in stem)
    return name if name.isidentifier() else f"table_{name}"


def _block_keys(name: str, key: _Key, table: SampledFile, path: str) -> dict[str, Any]:
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
    why = f"it has the {key.column.name} of {key.found:.1%} of the log's rows"
    if key.time is not None:
        return f"{why}; a version counts for rows later than its {key.time.name}"
    return f"{why}; it should say nothing of the time after a row, see docs/tables.md"
