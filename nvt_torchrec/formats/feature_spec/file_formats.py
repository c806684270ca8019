"""The formats of raw files, by the name in the spec: what specs and names of files say."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """What a spec, or the name of a file, says of a format.

    Attributes:
        delimiter: Of delimited text, what is between the fields unless the spec says otherwise.
        quoted: Whether fields may be quoted.
        lines: Whether it is text, with a row in each line.
        endings: How names of such files may end, without the dot.
    """

    delimiter: str = ""
    quoted: bool = False
    lines: bool = False
    endings: tuple[str, ...] = ()


#: By the name in the spec. The classes that read them are ``READERS`` of :mod:`clicklog.readers`.
INPUT_FORMATS = {
    "tsv": FileFormat("\t", lines=True),
    "csv": FileFormat(",", quoted=True, lines=True),
    "json": FileFormat(lines=True, endings=("jsonl", "ndjson")),
    "parquet": FileFormat(endings=("parquet", "pq")),
}
