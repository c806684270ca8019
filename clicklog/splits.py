"""The rows of a log that are for training, validation and test."""

from __future__ import annotations

SPLITS = ("train", "valid", "test")


def cut_last_day(rows: int, *, only_day: bool = False) -> dict[str, tuple[int, int]]:
    """Return row ranges ``[begin, end)`` of the last day's splits.

    All earlier days are for training. The first half is for validation (the odd row too), the
    second for test, as TorchRec's and NVIDIA's scripts cut day 23. A log of one day has no earlier
    day to train on: there the first 80 % of the rows are for training, and the rest is halved.

    Args:
        rows: rows of the last day.
        only_day: whether the log has no other day.
    """
    train = rows - rows // 5 if only_day else 0
    valid = train + (rows - train + 1) // 2
    return {"train": (0, train), "valid": (train, valid), "test": (valid, rows)}
