"""The blocks ``[label]`` of a spec's TOML file for labels from files other than the log."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.formats.feature_spec.columns import InputFormat
from nvt_torchrec.formats.feature_spec.label_files import LabelFile
from nvt_torchrec.formats.feature_spec.toml_parts import check_keys, field_names, make_part
from nvt_torchrec.formats.feature_spec.toml_tables import read_key

#: The keys that a label from another file must have, and no other label may have.
_FILE_KEYS = ("key", "within")


def is_from_file(block: Any) -> bool:
    """Return whether a ``[label]`` is from another file."""
    return isinstance(block, dict) and any(key in block for key in _FILE_KEYS)


def read_label_file(block: dict[str, Any], source: str) -> LabelFile:
    """Return the rule of a ``[label]`` from another file. Raises :class:`SettingsError`."""
    check_keys(block, {*field_names(LabelFile) - {"path", "key_names"}, "from"}, source)
    options = {"name": "label", "within": "", **block, **read_key(block)}
    options["path"] = options.pop("from", "")
    where = f"label {options['name']}: "
    if "input" in options:
        check_keys(options["input"], field_names(InputFormat), source)
        options["input"] = make_part(InputFormat, options["input"], where)
    return make_part(LabelFile, options, where)
