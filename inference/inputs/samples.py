"""Rows of a file as dicts of Python values, as clients send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvt_torchrec.clicklog.readers.stream import UnparsedRows
from nvt_torchrec.formats.spec.reading import Read
from nvt_torchrec.inference.inputs.ids import IdColumns, names_of_file
from nvt_torchrec.inference.inputs.rules import read_as_text

_NUMBERS: dict[str, Callable[[str], Any]] = {"int32": int, "int": int, "float": float}


def rows_as_dicts(piece: UnparsedRows, limit: int) -> list[dict[str, Any]]:
    """Return the well-formed rows of a piece, at most ``limit``, by source; None where missing.

    Of text, numbers become numbers, unless the spec has rules for how they are written.
    """
    spec = piece.spec
    lines = piece.parse(reject=True).line[:limit]
    reads = spec.read_plan(label=False).reads
    text = read_as_text(reads)
    names = tuple(spec.sources(label=False))
    found = IdColumns(names, names_of_file(piece.path, spec, piece)).read(piece, lines)
    columns = []
    for name in names:
        read = next(read for read in reads if read.source == name)
        values = found[name].to_pylist()
        if piece.block is None:
            number = None if name in text else _NUMBERS.get(read.raw)
            values = [_value(value, read, number, spec.input.list_separator) for value in values]
        columns.append(values)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _value(text: str, read: Read, number: Callable | None, separator: str) -> Any:
    if read.multi_hot:
        items = text.split(separator) if text else []
        return [number(item) for item in items] if number else items
    if not text:
        return None
    return number(text) if number else text
