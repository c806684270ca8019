"""The blocks ``[label]`` of a spec's TOML file that name other files than the log."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.formats.feature_spec.columns import InputFormat
from nvt_torchrec.formats.feature_spec.label_files import LabelFile
from nvt_torchrec.formats.feature_spec.toml_parts import check_keys, field_names, make_part
from nvt_torchrec.formats.feature_spec.toml_tables import read_key

#: Keys that only a label from another file has, and must have.
_OF_FILE = ("key", "within")


def is_from_file(block: Any) -> bool:
    """Return whether a ``[label]`` is from another file."""
    return isinstance(block, dict) and any(key in block for key in _OF_FILE)


def read_label_file(block: dict[str, Any], source: str) -> LabelFile:
    """Return what a ``[label]`` says of its files. Raises :class:`SettingsError`."""
    check_keys(block, {*field_names(LabelFile) - {"path", "key_names"}, "from"}, source)
    options = {"name": "label", "within": "", **block, **read_key(block)}
    options["path"] = options.pop("from", "")
    where = f"label {options['name']}: "
    if "input" in options:
        check_keys(options["input"], field_names(InputFormat), source)
        options["input"] = make_part(InputFormat, options["input"], where)
    return make_part(LabelFile, options, where)
