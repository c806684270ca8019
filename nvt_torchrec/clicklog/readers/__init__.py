"""Files to rows: the class that reads each format, and what it is made of."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.base.versions import import_name

#: By the name in a spec, the class, a :class:`.log_format.LogFormat`; or a module beside this one
#: and the class, which is imported when a log is read. A format also needs a line in
#: ``INPUT_FORMATS`` (:mod:`formats.feature_spec.file_formats`): what a spec must know of it.
READERS: dict[str, str | type] = {
    "tsv": "text_rows:Tsv",
    "csv": "text_rows:DelimitedText",
    "json": "json_rows:JsonLines",
    "parquet": "parquet_rows:Parquet",
}


def load_reader(name: str) -> Any:
    """Return the class of a format. Raises ImportError if it needs a package that is missing."""
    reader = READERS[name]
    if isinstance(reader, type):
        return reader
    module, _, kind = reader.partition(":")
    return import_name(f"{__name__}.{module}", kind)
