"""The tables ``[events]``, ``[[aggregate]]`` and ``[[history]]`` of a spec's TOML file."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.formats.feature_spec.columns import DenseColumn
from nvt_torchrec.formats.feature_spec.events import (
    AGGREGATE_VALUES,
    DEFAULT_VALUES,
    Aggregate,
    Events,
    HistoryRule,
)
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.feature_spec.toml_parts import as_list, check_keys, field_names, make_part


def read_events(block: Any, split: Split, source: str) -> Events:
    """Return the rule of ``[events]``; the column of the split is read as the split reads it."""
    check_keys(block, {*field_names(Events) - {"source", "between", "optional"}, "from"}, source)
    options = dict(block)
    if split.by == "time" and options.get("time") == split.column:
        options.setdefault("time_format", split.time_format)
    if "from" in options:
        options["source"] = options.pop("from")
    return make_part(Events, options, "events: ")


def read_aggregates(blocks: Any, label: str, source: str) -> list[DenseColumn]:
    """Return the columns of ``[[aggregate]]``, one for each of its values."""
    columns = []
    for block in blocks:
        check_keys(block, {*field_names(Aggregate) - {"value", "key"}, "values", "of"}, source)
        options = {key: value for key, value in block.items() if key not in ("values", "of")}
        for value in as_list(block.get("values", list(DEFAULT_VALUES))):
            own = {"value": value, **options}
            own.setdefault("label", label)
            for key in ("label", "smoothing") if value != "rate" else ():
                own.pop(key, None)
            if value == "since":
                own.pop("window", None)
            aggregate = make_part(
                Aggregate, {**own, "key": as_list(block.get("of", ""))}, "aggregate: "
            )
            transform, fill = AGGREGATE_VALUES[value]
            columns.append(
                DenseColumn(aggregate.name, fill, "float", transform=transform, aggregate=aggregate)
            )
    return columns


def read_history(block: Any, source: str) -> HistoryRule:
    """Return the rule of a table ``[[history]]``."""
    check_keys(block, {*field_names(HistoryRule) - {"key"}, "of"}, source)
    options = {key: value for key, value in block.items() if key != "of"}
    options |= {"key": as_list(block.get("of", [])), "columns": as_list(block.get("columns", []))}
    return make_part(HistoryRule, options, f"history {block.get('name')}: ")
