"""The formats of raw files, by the name in the spec: what a spec says of each and its class."""

from __future__ import annotations

import dataclasses
from typing import Any

from nvt_torchrec.base.versions import import_name


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """What a spec, or the name of a file, says of a format.

    Attributes:
        reader: The class that reads it, a ``LogFormat`` of :mod:`clicklog.readers.log_format`; or
            ``module:Class``, which is imported when a log is read.
        delimiter: Of delimited text, what is between the fields unless the spec says otherwise.
        quoted: Whether fields may be quoted.
        lines: Whether it is text, with a row in each line.
        endings: How names of such files may end, without the dot.
    """

    reader: str | type
    delimiter: str = ""
    quoted: bool = False
    lines: bool = False
    endings: tuple[str, ...] = ()

    def load(self) -> Any:
        """Return the class. Raises ImportError if it needs a package that is not installed."""
        if isinstance(self.reader, str):
            return import_name(*self.reader.split(":"))
        return self.reader


_READERS = "nvt_torchrec.clicklog.readers"
#: By the name in the spec. A format is added by its line, here or in a program of one's own.
INPUT_FORMATS = {
    "tsv": FileFormat(f"{_READERS}.text_rows:Tsv", delimiter="\t", lines=True),
    "csv": FileFormat(
        f"{_READERS}.text_rows:DelimitedText", delimiter=",", quoted=True, lines=True
    ),
    "json": FileFormat(f"{_READERS}.json_rows:JsonLines", lines=True, endings=("jsonl", "ndjson")),
    "parquet": FileFormat(f"{_READERS}.parquet_rows:Parquet", endings=("parquet", "pq")),
    "delta": FileFormat(f"{_READERS}.delta_tables:Delta"),
}
