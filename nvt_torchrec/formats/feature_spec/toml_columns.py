"""The blocks of a spec's TOML file that define columns: ``[[dense]]`` and ``[[categorical]]``."""

from __future__ import annotations

import re
from typing import Any

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.derivations import Derivation
from nvt_torchrec.formats.feature_spec.feature_spec import MAX_COLUMNS
from nvt_torchrec.formats.feature_spec.read_plan import Reading
from nvt_torchrec.formats.feature_spec.toml_parts import as_list, check_keys, field_names, make_part

#: The largest number of names in a range, checked before it is expanded.
_MAX_NAMES = 1000
#: The keys that become a :class:`Reading` and a :class:`Derivation`.
_READING = ("from", "nulls", "trim", "lenient")
_DERIVATION = ("derive", "time_format", "reference", "boundaries")


def read_columns(blocks: list[dict], kind: type, defaults: dict[str, Any], source: str) -> tuple:
    """Return the columns of the blocks of one kind.

    Args:
        blocks: The blocks ``[[dense]]`` or ``[[categorical]]``.
        kind: The class of the columns, :class:`DenseColumn` or :class:`CategoricalColumn`.
        defaults: Keys of ``[input]`` that are defaults of all columns.
        source: The name of the file, for errors.

    Raises:
        SettingsError: There is an unknown or contradictory key.
    """
    fields = field_names(kind) - {"name", "reading", "derive", "aggregate"}
    allowed = {*fields, "names", *_READING, *_DERIVATION}
    if not isinstance(blocks, list):
        raise SettingsError(
            f"{source}: columns in single brackets", "write [[dense]] and [[categorical]]"
        )
    columns: list[Any] = []
    for block in blocks:
        check_keys(block, allowed, source)
        names = block.get("names", [])
        names = _expand_names(names) if isinstance(names, str) else list(names)
        if not names:  # without this check a forgotten column would go unnoticed
            raise SettingsError(
                f"{source}: a block of columns without names: {block}", 'add names = "…" or a list'
            )
        if "from" in block and len(names) > 1:
            raise SettingsError(
                f"{source}: from = {block['from']!r} for {len(names)} columns",
                "write a block for each column",
            )
        where = f"column {names[0]}: "
        options = {key: value for key, value in block.items() if key in fields}
        options |= _make_reading(block, defaults, where)
        columns += [make_part(kind, {"name": name, **options}, where) for name in names]
    return tuple(columns)


def _make_reading(block: dict[str, Any], defaults: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields ``reading`` and, for derived columns, ``derive`` and ``raw``."""
    reading = {**defaults, **{key: block[key] for key in _READING if key in block}}
    if "from" in reading:
        reading["sources"] = as_list(reading.pop("from"))
    if "nulls" in reading:
        reading["nulls"] = as_list(reading["nulls"])
    derivation = {key: block[key] for key in _DERIVATION if key in block}
    try:
        options: dict[str, Any] = {"reading": make_part(Reading, reading)}
        if "derive" in derivation:
            derivation["kind"] = derivation.pop("derive")
            options["derive"] = make_part(Derivation, derivation)
            options["raw"] = block.get("raw", options["derive"].gives)
        elif derivation:
            raise SettingsError(f"{', '.join(derivation)} without derive", 'add derive = "…"')
    except SettingsError as error:
        raise SettingsError(f"{where}{error.what}", error.remedy) from None
    return options


def _expand_names(pattern: str) -> list[str]:
    """Expand ``"int_{0..12}"`` to int_0 … int_12; a name without braces stands for itself."""
    if not re.search("[{}]", pattern):
        return [pattern]
    match = re.fullmatch(r"([^{}]*)\{(\d+)\.\.(\d+)\}([^{}]*)", pattern)
    if not match or int(match[3]) < int(match[2]):
        raise SettingsError(
            f"names = {pattern!r} is not a range of names",
            'write "int_{0..12}"; put names that contain braces into a list',
        )
    head, first, last, tail = match.groups()
    if int(last) - int(first) >= _MAX_NAMES:
        raise SettingsError(f"names = {pattern!r:.60}", f"use at most {MAX_COLUMNS} columns")
    return [f"{head}{i}{tail}" for i in range(int(first), int(last) + 1)]
