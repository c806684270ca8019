"""The keys of events and the columns of their amounts, of the log and of its sources."""

from __future__ import annotations

from collections.abc import Sequence

from nvt_torchrec.formats.feature_spec.events import Aggregate, EventKey, HistoryRule


def list_groups(rules: Sequence[Aggregate], histories: Sequence[HistoryRule]) -> list[EventKey]:
    """Return the keys that events are grouped by, those of the log before those of sources."""
    keys = [rule.group for rule in rules if not rule.source]
    keys += [rule.group for rule in histories]
    keys += [rule.group for rule in rules if rule.source]
    return list(dict.fromkeys(keys))


def list_pairs(rules: Sequence[Aggregate]) -> list[EventKey]:
    """Return the keys extended by a column whose distinct values are counted.

    Those of the log come before those of sources.
    """
    of_log = [rule for rule in rules if not rule.source]
    of_sources = [rule for rule in rules if rule.source]
    pairs = []
    for rule in of_log + of_sources:
        if rule.column and not rule.kind.takes_numbers:
            pairs.append(EventKey((*rule.key, rule.column), rule.source))
    return list(dict.fromkeys(pairs))


def list_amounts(rules: Sequence[Aggregate], source: str = "") -> list[str]:
    """Return the columns of numbers that aggregates of a source need; "" is the log itself."""
    names = []
    for rule in rules:
        if rule.source == source and rule.column and rule.kind.takes_numbers:
            names.append(rule.column)
    return list(dict.fromkeys(names))
