"""Checks of the parts of a feature spec, whose fields have the types of their annotations."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from nvt_torchrec.base.errors import SettingsError, UnregisteredError

#: The keys of fields that have another name in the TOML file.
_KEYS = {"kind": "derive", "sources": "from"}
#: Commands register nothing of a program's own; those of ``etl`` and ``inference`` start likewise.
_IMPORTING = (
    'python -c "import MODULE; from nvt_torchrec.workflows.__main__ import main; exit(main())" '
    "inspect OUT/workflow"
)


def check(part: Any, where: str, *rules: tuple[str, Any, str]) -> None:
    """Check fields of a part of a spec.

    Args:
        part: The part; ``toml_keys`` has the keys of its fields that have another name there.
        where: What errors begin with, to name the part.
        rules: Of each the field, whether its value may stand there, and what to do if it may not.

    Raises:
        SettingsError: A value may not stand there.
    """
    for field, good, remedy in rules:
        if not good:
            key = field.removesuffix("_files")
            value = getattr(part, field)
            keys = _KEYS | getattr(part, "toml_keys", {})
            text = str(value).lower() if isinstance(value, bool) else f"{value!r:.80}"
            raise SettingsError(f"{where}{keys.get(key, key)} = {text}", remedy)


def check_registered(key: str, name: str, registry: Iterable[str]) -> None:
    """Check that a class is registered by a name. Raises :class:`UnregisteredError`."""
    if name not in registry:
        raise UnregisteredError(
            f"{key} = {name!r:.80}: nothing is registered by this name",
            f"{format_choices(registry)}; for one of your own, import the module that registers it "
            f"first, on a command line so: {_IMPORTING}",
        )


def format_choices(names: Iterable[str]) -> str:
    """Return the remedy for a value that is none of some."""
    return f"give one of {', '.join(names)}"


def did_you_mean(name: str, known: Any) -> str:
    """Return the remedy for an unknown name: a similar known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
