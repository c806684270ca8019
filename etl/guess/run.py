"""Guess a feature spec from a file."""

from __future__ import annotations

from nvt_torchrec.etl.guess.roles import assign
from nvt_torchrec.etl.guess.sample import take_sample
from nvt_torchrec.etl.guess.toml_text import to_toml

#: MiB of text that are read from the beginning of a file.
HEAD_MB = 8


def guess(path: str, *, label: str = "", delimiter: str = "", head_mb: int = HEAD_MB) -> str:
    """Return a first spec for a file as TOML; the same file gives the same text.

    Args:
        path: text, also compressed, or parquet; local or a URL.
        label: the name of the label's column, or its number from 1 on; "": find it.
        delimiter: of text, what is between the fields; "": find it.
        head_mb: MiB of text to read from the beginning.

    Raises:
        BadInputError: the file cannot be read, or no column can be the label.
    """
    sample = take_sample(path, head_mb << 20, delimiter)
    return to_toml(assign(sample, path, label), sample, path)
