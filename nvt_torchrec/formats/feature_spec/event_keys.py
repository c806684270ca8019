"""By which columns events are numbered, and which numbers they have: of the log, and of sources."""

from __future__ import annotations

from collections.abc import Sequence

from nvt_torchrec.formats.feature_spec.events import Aggregate, EventKey, HistoryRule


def list_groups(rules: Sequence[Aggregate], histories: Sequence[HistoryRule]) -> list[EventKey]:
    """Return the key of each group of events, those of the log before those of sources."""
    keys = [rule.group for rule in rules if not rule.source]
    keys += [rule.group for rule in histories]
    keys += [rule.group for rule in rules if rule.source]
    return list(dict.fromkeys(keys))


def list_pairs(rules: Sequence[Aggregate]) -> list[EventKey]:
    """Return each key of a group with a column whose values are counted, in the same order."""
    pairs = []
    for rule in sorted(rules, key=lambda rule: bool(rule.source)):
        if rule.column and not rule.kind.takes_numbers:
            pairs.append(EventKey((*rule.key, rule.column), rule.source))
    return list(dict.fromkeys(pairs))


def list_amounts(rules: Sequence[Aggregate], source: str = "") -> list[str]:
    """Return the columns of a source, or of the log, whose numbers aggregates are of."""
    chosen = [rule for rule in rules if rule.source == source]
    names = [rule.column for rule in chosen if rule.column and rule.kind.takes_numbers]
    return list(dict.fromkeys(names))
