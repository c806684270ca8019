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
    """Return the rule of ``[events]``; the column of a split by time has the split's format."""
    check_keys(block, {*field_names(Events) - {"source", "between", "optional"}, "from"}, source)
    options = dict(block)
    if split.by == "time" and options.get("time") == split.column:
        options.setdefault("time_format", split.time_format)
    if "from" in options:
        options["source"] = options.pop("from")
    return make_part(Events, options, "events: ")


#: The keys of ``[[aggregate]]`` that apply to each of its values.
_VALUE_KEYS = ("window", "label", "smoothing", "source")


def read_aggregates(blocks: Any, label: str, source: str) -> list[DenseColumn]:
    """Return the columns of ``[[aggregate]]``, one for each of its values.

    Args:
        blocks: The blocks.
        label: The label of rates that do not name one.
        source: The name of the file, for errors.

    Raises:
        SettingsError: A block has an unknown or contradictory key.
    """
    columns = []
    for block in blocks:
        check_keys(block, {*_VALUE_KEYS, "of", "values", "transform"}, source)
        default = [name for name in DEFAULT_VALUES if _is_default_value(name, block)]
        for value in as_list(block.get("values", default)):
            options = _make_value_options(value, block, label)
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
    """Return whether a default value applies: events of a source have no label for rates."""
    return "source" not in block or not AGGREGATES[value].has_label


def _make_value_options(value: Any, block: dict[str, Any], label: str) -> dict[str, Any]:
    """Return the fields of a value's :class:`Aggregate`, from the block's keys that apply to it.

    Args:
        value: The value, such as "count" or "sum(amount)"; of another type if the file is wrong.
        block: The block.
        label: The label of rates that do not name one.
    """
    options = {"value": value, "key": as_list(block.get("of", ""))}
    options |= {key: block[key] for key in _VALUE_KEYS if key in block}
    kind = None
    if isinstance(value, str):
        with_column = re.fullmatch(r"(\w+)\((.+)\)", value)
        if with_column:
            options["value"], options["column"] = with_column.groups()
        kind = AGGREGATES.get(options["value"])
    if kind is not None and kind.has_label:
        options.setdefault("label", label)
    else:
        options.pop("label", None)
        options.pop("smoothing", None)
    if kind is not None and not kind.has_window:
        options.pop("window", None)
    return options


def read_history(block: Any, source: str) -> HistoryRule:
    """Return the rule of a block ``[[history]]``."""
    check_keys(block, {*field_names(HistoryRule) - {"key"}, "of"}, source)
    options = {key: value for key, value in block.items() if key != "of"}
    options |= {"key": as_list(block.get("of", [])), "columns": as_list(block.get("columns", []))}
    return make_part(HistoryRule, options, f"history {block.get('name')}: ")
