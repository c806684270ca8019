"""Columns of the input that are copied to the output, to identify rows."""

from __future__ import annotations

import difflib

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows


def check_id_columns(names: tuple[str, ...], first: UnparsedRows) -> None:
    """Check the names of columns to copy. ``first`` is the first piece of the file.

    Raises:
        SchemaError: The file has no such column.
        SettingsError: A name occurs twice, or is in the output anyway.
    """
    taken = ("row", "probability", "label", *(["weight"] if first.spec.weight else []))
    for name in names:
        if name in taken or names.count(name) > 1:
            raise SettingsError(
                f"--id_columns {','.join(names)}: {name!r} is in the output already", "leave it out"
            )
    available = list(first.names()) if names else []
    for name in names:
        if available.count(name) != 1:
            close = difflib.get_close_matches(name, available, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SchemaError(
                f"{first.path}: column {name} of --id_columns is "
                f"{'ambiguous' if name in available else 'missing'}",
                f"{hint}it has {', '.join(available[:50])}",
            )
