"""Frappe's training rows, from the original log, where BARS' train.csv can't be had.

Each of the log's rows is positive, and has two negative ones: the same user and context with an
item that the user never used, each at most once a user. Ids count values in the order of the log,
column after column. So the positive rows, and the users and contexts of the negative ones, are what
valid and test leave over. The items of the negative rows are drawn, from those that valid and test
leave over.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

#: Negative rows for each positive one.
_NEGATIVES = 2


def rebuild_train(log: pd.DataFrame, known: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Return the rows of train, in random order.

    Args:
        log: The original log's rows, text; columns of the same names, and others.
        known: The rows of valid and test: ``label``, 0 or 1, and an id for each column; ``user``
            and ``item`` are among them.
        seed: Of the items and the order.
    """
    columns = list(known.columns[1:])
    context = [name for name in columns if name != "item"]
    positives, item_ids = _number_values(log, columns)
    known_positives, known_negatives = (known[known["label"] == label] for label in (1, 0))
    left = _count(positives, columns) - _count(known_positives, columns)
    rows = [(1, *row) for row in left.elements()]

    wanted = Counter({row: _NEGATIVES * n for row, n in _count(positives, context).items()})
    missing = wanted - _count(known_negatives, context)
    contexts: dict[int, list[tuple[int, ...]]] = {}
    for row in sorted(missing.elements()):
        contexts.setdefault(row[context.index("user")], []).append(row)
    taken = pd.concat([positives, known_negatives]).groupby("user")["item"].agg(set)
    random = np.random.default_rng(seed)
    at = columns.index("item")
    for user, of_user in contexts.items():
        free = np.setdiff1d(item_ids, list(taken[user]))
        drawn = random.choice(free, len(of_user), replace=False)
        rows += [
            (0, *row[:at], int(item), *row[at:]) for row, item in zip(of_user, drawn, strict=True)
        ]
    table = pd.DataFrame(rows, columns=["label", *columns])
    return table.iloc[random.permutation(len(table))].reset_index(drop=True)


def _number_values(log: pd.DataFrame, columns: list[str]) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the log as ids, and the ids of its items."""
    first = 0
    numbered = {}
    item_ids = np.array([], dtype=np.int64)
    for name in columns:
        numbers, values = pd.factorize(log[name])
        numbered[name] = numbers + first
        if name == "item":
            item_ids = np.arange(first, first + len(values))
        first += len(values)
    return pd.DataFrame(numbered), item_ids


def _count(rows: pd.DataFrame, columns: list[str]) -> Counter[tuple[int, ...]]:
    """Return how often each row occurs."""
    return Counter(map(tuple, rows[columns].to_numpy().tolist()))
