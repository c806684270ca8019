"""The blocks of a spec's TOML file that name tables: ``[[table]]``."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.formats.feature_spec.columns import InputFormat
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.feature_spec.toml_parts import as_list, check_keys, field_names, make_part


def read_table(block: Any, source: str) -> TableRule:
    """Return the rule of a ``[[table]]``. Raises :class:`SettingsError`."""
    check_keys(block, field_names(TableRule) - {"key_names"}, source)
    options = {**block, **read_key(block)}
    if "input" in options:
        where = f"table {options.get('name', '')}: "
        check_keys(options["input"], field_names(InputFormat), source)
        options["input"] = make_part(InputFormat, options["input"], where)
    return make_part(TableRule, options, "table: ")


def read_key(block: dict[str, Any]) -> dict[str, Any]:
    """Return ``key``, and ``key_names`` where the key of a block says other names."""
    key = block.get("key", "")
    if isinstance(key, dict):
        return {"key": [*key], "key_names": [*key.values()]}
    return {"key": as_list(key)}
