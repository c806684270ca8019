"""The formats of raw files, by the name in the spec, as far as specs and file names need them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """A format of raw files.

    Attributes:
        delimiter: The default delimiter between the fields of a line; "" unless the format is
            delimited text.
        quoted: Whether fields may be quoted.
        lines: Whether each line of the file is a row.
        endings: The endings of file names that have this format, without the dot.
    """

    delimiter: str = ""
    quoted: bool = False
    lines: bool = False
    endings: tuple[str, ...] = ()


#: The formats by name. ``READERS`` of :mod:`clicklog.readers` has the classes that read them.
INPUT_FORMATS = {
    "tsv": FileFormat("\t", lines=True),
    "csv": FileFormat(",", quoted=True, lines=True),
    "json": FileFormat(lines=True, endings=("jsonl", "ndjson")),
    "parquet": FileFormat(endings=("parquet", "pq")),
}
