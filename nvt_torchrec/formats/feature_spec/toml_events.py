"""The tables ``[events]``, ``[[aggregate]]`` and ``[[history]]`` of a spec's TOML file."""

from __future__ import annotations

import re
from typing import Any

from nvt_torchrec.formats.feature_spec.aggregates import AGGREGATES, DEFAULT_VALUES
from nvt_torchrec.formats.feature_spec.columns import DenseColumn
from nvt_torchrec.formats.feature_spec.events import Aggregate, Events, HistoryRule
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


#: Keys of ``[[aggregate]]`` that are those of each of its values.
_OF_AGGREGATE = ("window", "label", "smoothing", "source")


def read_aggregates(blocks: Any, label: str, source: str) -> list[DenseColumn]:
    """Return the columns of ``[[aggregate]]``, one for each of its values.

    Args:
        blocks: The tables.
        label: The label of rates without one.
        source: Names where the tables are from in errors.

    Raises:
        SettingsError: A table has an unknown or contradictory key.
    """
    columns = []
    for block in blocks:
        check_keys(block, {*_OF_AGGREGATE, "of", "values", "transform"}, source)
        default = [name for name in DEFAULT_VALUES if _is_default_value(name, block)]
        for value in as_list(block.get("values", default)):
            options = _options_of_value(value, block, label)
            aggregate = make_part(Aggregate, options, "aggregate: ")
            kind = aggregate.kind
            column = {
                "name": aggregate.name,
                "fill": kind.fill,
                "raw": "float",
                "transform": block.get("transform", kind.transform),
                "aggregate": aggregate,
            }
            columns.append(make_part(DenseColumn, column, f"column {aggregate.name}: "))
    return columns


def _is_default_value(value: str, block: dict[str, Any]) -> bool:
    """Return whether a default value is one of a table: events of a source have no label."""
    return "source" not in block or not AGGREGATES[value].has_label


def _options_of_value(value: Any, block: dict[str, Any], label: str) -> dict[str, Any]:
    """Return the fields of a value's :class:`Aggregate`: keys of the table that it has a use for.

    Args:
        value: The value, such as "count" or "sum(amount)".
        block: The table.
        label: The label of rates without one.
    """
    options = {"value": value, "key": as_list(block.get("of", ""))}
    options |= {key: block[key] for key in _OF_AGGREGATE if key in block}
    of_column = re.fullmatch(r"(\w+)\((.+)\)", value) if isinstance(value, str) else None
    if of_column:
        options["value"], options["column"] = of_column.groups()
    kind = AGGREGATES.get(options["value"]) if isinstance(options["value"], str) else None
    if kind is not None and kind.has_label:
        options.setdefault("label", label)
    else:
        options.pop("label", None)
        options.pop("smoothing", None)
    if kind is not None and not kind.has_window:
        options.pop("window", None)
    return options


def read_history(block: Any, source: str) -> HistoryRule:
    """Return the rule of a table ``[[history]]``."""
    check_keys(block, {*field_names(HistoryRule) - {"key"}, "of"}, source)
    options = {key: value for key, value in block.items() if key != "of"}
    options |= {"key": as_list(block.get("of", [])), "columns": as_list(block.get("columns", []))}
    return make_part(HistoryRule, options, f"history {block.get('name')}: ")
