"""Checks of a feature spec's values. The types of its fields have been checked before."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from nvt_torchrec.base.errors import SettingsError, UnregisteredError

#: The TOML keys of fields whose names differ from them.
_KEYS = {"kind": "derive", "sources": "from"}
#: How to run a command after importing a module, because the commands import no modules of the
#: user's. The other commands (``etl``, ``inference``) are started in the same way.
_IMPORTING = (
    'python -c "import MODULE; from nvt_torchrec.workflows.__main__ import main; exit(main())" '
    "inspect OUT/workflow"
)


def check(part: Any, where: str, *rules: tuple[str, Any, str]) -> None:
    """Check the fields of a part of a spec, in order.

    Args:
        part: The part. Its class attribute ``toml_keys``, if any, maps fields to their TOML keys.
        where: The beginning of error messages, which names the part.
        rules: Triples of a field's name, whether its value is allowed, and the remedy if not.

    Raises:
        SettingsError: A value is not allowed.
    """
    for field, is_allowed, remedy in rules:
        if is_allowed:
            continue
        key = field.removesuffix("_files")
        keys = _KEYS | getattr(part, "toml_keys", {})
        value = getattr(part, field)
        text = str(value).lower() if isinstance(value, bool) else f"{value!r:.80}"
        raise SettingsError(f"{where}{keys.get(key, key)} = {text}", remedy)


def check_registered(key: str, name: str, registry: Iterable[str]) -> None:
    """Raise :class:`UnregisteredError` unless a class is registered under a name."""
    if name not in registry:
        raise UnregisteredError(
            f"{key} = {name!r:.80}: nothing is registered under this name",
            f"{format_choices(registry)}; to use your own class, first import the module that "
            f"registers it, on a command line like this: {_IMPORTING}",
        )


def format_choices(names: Iterable[str]) -> str:
    """Return the remedy for a value that is not among the allowed names."""
    return f"give one of {', '.join(names)}"


def did_you_mean(name: str, known: Any) -> str:
    """Return the remedy for an unknown name: a similar known name, or all known names."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
