"""Readers of the file formats: files to rows."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.base.versions import import_name

#: The readers by the name of the format in a spec: a subclass of :class:`.log_format.LogFormat`, or
#: "MODULE:CLASS" in this package, which is imported when a log is read. A format also needs a line
#: in ``INPUT_FORMATS`` (:mod:`formats.feature_spec.file_formats`), which specs use.
READERS: dict[str, str | type] = {
    "tsv": "text_rows:Tsv",
    "csv": "text_rows:DelimitedText",
    "json": "json_rows:JsonLines",
    "parquet": "parquet_rows:Parquet",
}


def load_reader(name: str) -> Any:
    """Return the reader of a format. Raises ImportError if it needs a package that is missing."""
    reader = READERS[name]
    if isinstance(reader, type):
        return reader
    module, _, kind = reader.partition(":")
    return import_name(f"{__name__}.{module}", kind)
