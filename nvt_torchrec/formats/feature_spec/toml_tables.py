"""The blocks of a spec's TOML file about additional files: tables, their vectors, and sources."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.formats.feature_spec.columns import InputFormat
from nvt_torchrec.formats.feature_spec.source_rules import SourceRule
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.feature_spec.toml_parts import as_list, check_keys, field_names, make_part
from nvt_torchrec.formats.feature_spec.vector_columns import VectorColumn


def read_table(block: Any, source: str) -> TableRule:
    """Return the rule of a ``[[table]]``. Raises :class:`SettingsError`."""
    check_keys(block, field_names(TableRule) - {"key_names"}, source)
    options = {**block, **read_key(block)}
    _read_input(options, f"table {options.get('name', '')}: ", source)
    return make_part(TableRule, options, "table: ")


def read_vector(block: Any, source: str) -> VectorColumn:
    """Return the vector of a block ``[[vector]]``. Raises :class:`SettingsError`."""
    check_keys(block, {*field_names(VectorColumn) - {"source"}, "from"}, source)
    options = {**block}
    if "from" in options:
        options["source"] = options.pop("from")
    return make_part(VectorColumn, options, f"vector {options.get('name', '')}: ")


def read_source(block: Any, source: str) -> SourceRule:
    """Return the rule of a ``[[source]]``. Raises :class:`SettingsError`."""
    check_keys(block, field_names(SourceRule) - {"key_names"}, source)
    options = dict(block)
    key = options.get("key", {})
    if not isinstance(key, dict):  # columns whose names are the same in the log and the source
        key = {name: name for name in as_list(key)}
    options["key"] = [*key]
    options["key_names"] = [*key.values()]
    options["nulls"] = as_list(options.get("nulls", []))
    _read_input(options, f"source {options.get('name', '')}: ", source)
    return make_part(SourceRule, options, "source: ")


def _read_input(options: dict[str, Any], where: str, source: str) -> None:
    """Replace the options' ``input`` table, if they have one, by an :class:`InputFormat`."""
    if "input" in options:
        check_keys(options["input"], field_names(InputFormat), source)
        options["input"] = make_part(InputFormat, options["input"], where)


def read_key(block: dict[str, Any]) -> dict[str, Any]:
    """Return ``key`` of a block, and ``key_names`` if the block maps the key to other names."""
    key = block.get("key", "")
    if isinstance(key, dict):
        return {"key": [*key], "key_names": [*key.values()]}
    return {"key": as_list(key)}
