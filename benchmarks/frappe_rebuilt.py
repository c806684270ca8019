"""Rebuild Frappe's training rows from the original log, in case BARS' train.csv is unavailable.

Each row of the log is positive and has two negatives: the same user and context with an item that
the user never used, each item at most once per user. Ids number the values in the order of the log,
column after column. So the positives of train, and the users and contexts of its negatives, are
those that valid and test do not have. The items of the negatives are drawn from those that the user
has in no other row.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

#: The number of negatives for each positive.
_NEGATIVES = 2


def rebuild_train(log: pd.DataFrame, known: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Return the rows of train, in random order.

    Args:
        log: The rows of the original log as strings, with at least the columns of ``known``.
        known: The rows of valid and test: ``label``, 0 or 1, and an id for each column, ``user``
            and ``item`` among them.
        seed: The seed of the items and the order.
    """
    columns = list(known.columns[1:])
    context_columns = [name for name in columns if name != "item"]
    positives, item_ids = _number_values(log, columns)
    known_positives = known[known["label"] == 1]
    known_negatives = known[known["label"] == 0]
    train_positives = _count(positives, columns) - _count(known_positives, columns)
    rows = [(1, *row) for row in train_positives.elements()]

    contexts = _count(positives, context_columns)
    all_negatives = Counter({row: _NEGATIVES * n for row, n in contexts.items()})
    train_negatives = all_negatives - _count(known_negatives, context_columns)
    contexts_by_user: dict[int, list[tuple[int, ...]]] = {}
    user_index = context_columns.index("user")
    for context in sorted(train_negatives.elements()):
        contexts_by_user.setdefault(context[user_index], []).append(context)
    taken = pd.concat([positives, known_negatives]).groupby("user")["item"].agg(set)
    random = np.random.default_rng(seed)
    item_index = columns.index("item")
    for user, user_contexts in contexts_by_user.items():
        free = np.setdiff1d(item_ids, list(taken[user]))
        drawn = random.choice(free, len(user_contexts), replace=False)
        for context, item in zip(user_contexts, drawn, strict=True):
            rows.append((0, *context[:item_index], int(item), *context[item_index:]))
    table = pd.DataFrame(rows, columns=["label", *columns])
    return table.iloc[random.permutation(len(table))].reset_index(drop=True)


def _number_values(log: pd.DataFrame, columns: list[str]) -> tuple[pd.DataFrame, np.ndarray]:
    """Replace the values of the log by ids; return it, and the ids of its items."""
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
    """Count each distinct row."""
    return Counter(map(tuple, rows[columns].to_numpy().tolist()))
