"""The blocks of a spec's TOML file that name tables: ``[[table]]``."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.formats.feature_spec.columns import InputFormat
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.feature_spec.toml_parts import as_list, check_keys, field_names, make_part


def read_table(block: Any, source: str) -> TableRule:
    """Return the rule of a ``[[table]]``. Raises :class:`SettingsError`."""
    check_keys(block, field_names(TableRule) - {"key_names"}, source)
    options = dict(block)
    key = options.get("key", "")
    if isinstance(key, dict):
        options["key"] = [*key]
        options["key_names"] = [*key.values()]
    else:
        options["key"] = as_list(key)
    if "input" in options:
        where = f"table {options.get('name', '')}: "
        check_keys(options["input"], field_names(InputFormat), source)
        options["input"] = make_part(InputFormat, options["input"], where)
    return make_part(TableRule, options, "table: ")
