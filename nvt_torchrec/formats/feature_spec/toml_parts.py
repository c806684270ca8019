"""Helpers for reading the blocks of a spec's TOML file."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.validation import convert
from nvt_torchrec.formats.feature_spec.field_checks import did_you_mean

T = TypeVar("T")


def make_part(kind: type[T], options: dict[str, Any], where: str = "") -> T:
    """Make a part of a spec, checking the types of its fields. Raises :class:`SettingsError`."""
    try:
        return convert(kind, options)
    except ValueError as error:
        raise SettingsError(f"{where}{error}") from None


def field_names(kind: type) -> set[str]:
    """Return the names of a dataclass's fields."""
    return {field.name for field in dataclasses.fields(kind)}


def as_list(given: Any) -> Any:
    """Return a string as a list of one item, and any other value unchanged."""
    return [given] if isinstance(given, str) else given


def check_keys(value: Any, allowed: set[str], source: str) -> None:
    """Raise :class:`SettingsError` unless a value is a table with allowed keys only."""
    if not isinstance(value, dict):
        raise SettingsError(
            f"{source}: not a feature spec: {value!r:.60} instead of a table",
            f"write a table with {', '.join(sorted(allowed))}",
        )
    for key in value:
        if key not in allowed:
            raise SettingsError(f"{source}: unknown key {key!r}", did_you_mean(key, allowed))
