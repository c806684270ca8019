"""Parse rows of files other than the log, of tables and labels, each of which has a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows
from nvt_torchrec.clicklog.text.assemble import hash_keys, take
from nvt_torchrec.formats.rows import NO_TIME, RawRows, is_missing


@dataclasses.dataclass(frozen=True)
class KeyedRows:
    """A piece of a file.

    Attributes:
        first_line: The line number of the first row in messages.
        rows: The rows, without malformed ones.
        keys: int64 [n], the hashes of their keys.
        times: int64 [n], their times, :data:`NO_TIME` where missing; None if the spec has no time.
        rejected: For each malformed row, a line for the file of rejected rows.
    """

    first_line: int
    rows: RawRows
    keys: np.ndarray
    times: np.ndarray | None
    rejected: list[bytes]


def parse_keyed(
    unparsed: UnparsedRows,
    source: str,
    what: str,
    key: tuple[str, ...],
    *,
    time: str = "",
    reject: bool = False,
) -> KeyedRows:
    """Parse rows whose last categorical columns are the columns of their key.

    Args:
        unparsed: The rows.
        source: The name of the file in errors.
        what: The role of the file in errors, such as "table items".
        key: The columns of the key.
        time: The column of a time that every row must have, while rows may lack a key; "" if every
            row must have a key.
        reject: Whether malformed rows are left out.

    Raises:
        BadRowError: A row is malformed, or has no key or no time.
    """
    rows = unparsed.drop_label().parse(reject=reject)
    first_key = len(rows.categorical) - len(key)
    columns = []
    for j in range(first_key, len(rows.categorical)):
        columns.append((rows.categorical[j], is_missing(rows.categorical_missing, j)))
    hashed = hash_keys([columns], len(rows))
    assert hashed is not None
    keys = hashed[0]
    times = rows.join_times
    if time and times is not None:
        is_bad = times == NO_TIME
        reason = f"{what}: a row without {time}"
    else:
        is_bad = keys == 0
        reason = f"{what}: a row without its key, {', '.join(key)}"
    described = [(row.line, row.reason, row.text) for row in rows.bad]
    if is_bad.any():
        described += [(line, reason, b"") for line in rows.line[is_bad].tolist()]
        if not reject:
            line, reason, _ = min(described)
            raise BadRowError(
                f"{source}, {unparsed.format.unit} {unparsed.first_line + line}: {reason}",
                "correct the file, or leave such rows out with --on_bad_rows quarantine",
            )
        rows = take(rows, ~is_bad)
        keys = keys[~is_bad]
        times = None if times is None else times[~is_bad]
    rejected = format_rejected(source, unparsed.first_line, described)
    return KeyedRows(unparsed.first_line, rows, keys, times, rejected)


def format_rejected(
    path: str, first_line: int, described: list[tuple[int, str, bytes]]
) -> list[bytes]:
    """Return lines for the file of rejected rows.

    Args:
        path: The file that has the rows.
        first_line: The line number of the first row that was read.
        described: For each rejected row, its line relative to ``first_line``, the reason, and its
            text.
    """
    lines = []
    for line, reason, text in sorted(described):
        shown = text.replace(b"\r", b"").replace(b"\n", b"\\n")
        lines.append(f"{path}\t{first_line + line}\t{reason}\t".encode() + shown + b"\n")
    return lines


def make_no_rows_error(what: str, paths: Sequence[str], rejected: list[bytes]) -> BadInputError:
    """Return the error for files without any usable row.

    Args:
        what: The role of the files, such as "table items".
        paths: The files.
        rejected: The lines that :func:`format_rejected` returned for them.
    """
    listed = ", ".join(paths)
    if not rejected:
        return BadInputError(f"{what}: {listed}: no rows", "pass files with rows")
    path, line, reason, _ = rejected[0].decode(errors="replace").split("\t", 3)
    return BadInputError(
        f"{what}: {listed}: no well-formed row; {path}, line {line}: {reason}",
        "correct the files, or how the spec reads them",
    )
