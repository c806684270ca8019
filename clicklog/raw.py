"""The files of a raw click log: which days there are, and their lines as blocks of bytes.

Paths may be remote (anything fsspec opens). Rows are addressed by bytes: a :class:`Block` is a
range of whole lines of one file, so the same log always falls into the same blocks, whoever
reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import lzma
import re
import zlib
from collections.abc import Collection, Iterator

import fsspec
import numpy as np

from clicklog.errors import BadInputError, BadRowError, SettingsError
from clicklog.spec import FeatureSpec
from clicklog.tokenizer import RawRows, parse_rows

_DAY_NAME = re.compile(r"day_(\d+)(\.tsv|\.txt)?(\.(gz|bz2|xz))?")
_SCAN_BYTES = 8 << 20
_LINE_BYTES = 64 << 10  # enough to hold the end of nearly every line
#: Lines by whose fields the presence of a label is told: one broken line must not decide.
_LABEL_LINES = 100


@dataclasses.dataclass(frozen=True)
class DayFile:
    """One day of a log.

    Attributes:
        day: its number, from the name ``day_<number>``.
        path: where its bytes are.
        size: bytes of the file, compressed if it is.
        source: the file as the user knows it; ``path`` may be a decompressed copy.
        modified: seconds since 1970, where the file system tells.
        compressed: whether it must be decompressed before blocks can be cut.
    """

    day: int
    path: str
    size: int
    source: str
    modified: float | None = None
    compressed: bool = False


@dataclasses.dataclass(frozen=True)
class Block:
    """Whole lines: the bytes ``[begin, end)`` of ``path``; ``source`` names the file in errors."""

    path: str
    begin: int
    end: int
    source: str


def parse_days(text: str) -> set[int]:
    """``"0-3,7"`` → {0, 1, 2, 3, 7}. Raises :class:`SettingsError`."""
    days: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise SettingsError(f"days {text!r}: cannot read {part!r}", "write for example 0-3,7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise SettingsError(f"days {text!r}: {part!r} ends before it begins", "write 0-3")
        days.update(range(first, last + 1))
    return days


def find_days(input_path: str, days: Collection[int] | None = None) -> list[DayFile]:
    """The days of a log in a directory, by number.

    Args:
        input_path: a directory with ``day_0``, ``day_1.tsv``, ``day_2.gz`` …
        days: which to take; without, all there are, which must have no gap.

    Raises:
        BadInputError: no such directory, no days in it, a day missing, empty or twice there.
    """
    filesystem, root = fsspec.core.url_to_fs(str(input_path))
    if not filesystem.exists(root):
        raise BadInputError(f"{input_path}: no such directory", "pass the directory of day_0 …")
    found: dict[int, DayFile] = {}
    for info in filesystem.ls(root, detail=True):
        match = _DAY_NAME.fullmatch(info["name"].rstrip("/").rsplit("/", 1)[-1])
        if not match or info["type"] == "directory":  # links are files too
            continue
        day, path = int(match[1]), filesystem.unstrip_protocol(info["name"])
        path = path.removeprefix("file://")
        if days is not None and day not in days:
            continue
        if day in found:
            raise BadInputError(
                f"day {day} is there twice: {found[day].path}, {path}", "remove one"
            )
        info = filesystem.info(info["name"])  # of what a link points to
        if not info["size"]:
            raise BadInputError(f"{path}: empty file", f"fetch day {day} again, or leave it out")
        modified = info.get("mtime")
        found[day] = DayFile(day, path, info["size"], path, modified, bool(match[3]))
    if not found and not days:
        raise BadInputError(
            f"{input_path}: no files day_0, day_1 … in it",
            "make a log with `python -m etl synthesize`, or see README.md for the real one",
        )
    wanted = set(range(min(found), max(found) + 1)) if days is None else set(days)
    missing = sorted(wanted - found.keys())
    if missing:
        present = ",".join(map(str, sorted(found)))
        choose = f", or choose what is there with --days {present}" if found else ""
        raise BadInputError(
            f"{input_path}: missing {', '.join(f'day_{day}' for day in missing)}",
            f"add the files{choose}",
        )
    return [found[day] for day in sorted(found)]


@functools.lru_cache(maxsize=64)
def _filesystem(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    return fsspec.core.url_to_fs(path)


def read_bytes(path: str, begin: int, end: int) -> bytes:
    """The bytes ``[begin, end)``. Raises :class:`BadInputError` if they are not there."""
    filesystem, name = _filesystem(path)
    try:
        with filesystem.open(name, "rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error}") from error
    if len(data) != end - begin:
        raise BadInputError(
            f"{path}: {begin + len(data)} bytes instead of {end}: it shrank while it was read",
            "start again once nobody writes it",
        )
    return data


def _chunks(
    path: str, begin: int, end: int, size: int = _SCAN_BYTES
) -> Iterator[tuple[int, np.ndarray]]:
    for at in range(begin, end, size):
        yield at, np.frombuffer(read_bytes(path, at, min(at + size, end)), np.uint8)


def count_lines(path: str, begin: int, end: int) -> int:
    """Lines in the bytes ``[begin, end)``; a last line without its newline counts."""
    lines, last = 0, 10
    for _, chunk in _chunks(path, begin, end):
        lines += int(np.count_nonzero(chunk == 10))
        last = int(chunk[-1])
    return lines + (last != 10)


def offset_of_line(path: str, line: int, size: int) -> int:
    """Byte at which line ``line`` (from 0) begins; ``size`` if there are no more lines."""
    if line <= 0:
        return 0
    seen = 0
    for at, chunk in _chunks(path, 0, size):
        lines = int(np.count_nonzero(chunk == 10))
        if seen + lines >= line:
            return at + int(np.flatnonzero(chunk == 10)[line - seen - 1]) + 1
        seen += lines
    return size


def cut_blocks(path: str, begin: int, end: int, block_bytes: int, source: str) -> list[Block]:
    """Cut ``[begin, end)`` (whole lines) into blocks of about ``block_bytes``.

    Each cut is the first line end at or after a multiple of ``block_bytes``, so that a block does
    not depend on the ones before it.
    """
    cuts = [begin]
    for nominal in range(begin + block_bytes, end, block_bytes):
        if nominal <= cuts[-1]:
            continue
        for at, chunk in _chunks(path, nominal - 1, end, _LINE_BYTES):
            ends = np.flatnonzero(chunk == 10)
            if len(ends):
                cuts.append(at + int(ends[0]) + 1)
                break
    if cuts[-1] != end:
        cuts.append(end)
    return [Block(path, *cut, source) for cut in itertools.pairwise(cuts)]


def has_label(day: DayFile, spec: FeatureSpec) -> bool:
    """Whether a day's rows begin with the label; see :func:`_begins_with_label`."""
    return _begins_with_label(read_bytes(day.path, 0, min(day.size, 1 << 16)), day.source, spec)


def _begins_with_label(head: bytes, source: str, spec: FeatureSpec) -> bool:
    """Whether rows begin with the label: what the fields of most of the first lines say.

    Raises:
        BadRowError: none of them has as many fields as the spec, or one less.
    """
    columns = len(spec.columns)
    lines = head.split(b"\n", _LABEL_LINES)
    whole = lines[:-1] or lines  # the last one may be cut
    fields = [line.count(b"\t") + 1 for line in whole]
    with_label, without = fields.count(columns), fields.count(columns - 1)
    if not with_label and not without:
        raise BadRowError(
            f"{source}, line 1: {fields[0]} tab-separated fields",
            f"{columns} are needed ({columns - 1} without the label): {spec.columns[0]}, "
            f"{spec.columns[1]} … {spec.columns[-1]}",
        )
    return with_label >= without


def read_block(
    block: Block, spec: FeatureSpec, *, label: bool = True, reject: bool = False
) -> RawRows:
    """Read and parse a block.

    Args:
        block: the lines.
        spec: the columns.
        label: whether rows begin with the label.
        reject: leave bad rows out (they are in ``RawRows.bad``) instead of raising.

    Raises:
        BadRowError: a row breaks the spec, with file, line, column and value.
    """
    text = read_bytes(block.path, block.begin, block.end)
    rows = parse_rows(text, spec, label=label, reject=reject)
    if rows.bad_count and not reject:
        _raise_bad_row(rows, block.source, count_lines(block.path, 0, block.begin) + 1)
    return rows


def _raise_bad_row(rows: RawRows, source: str, first_line: int) -> None:
    first = rows.bad[0]
    more = f" (and {rows.bad_count - 1} more rows near it)" if rows.bad_count > 1 else ""
    raise BadRowError(
        f"{source}, line {first_line + first.line}: {first.what}{more}",
        "correct the file, or leave such rows out with --bad_rows reject",
    )


def stream_rows(
    path: str, spec: FeatureSpec, *, block_bytes: int, reject: bool = False
) -> Iterator[tuple[np.ndarray, RawRows]]:
    """Read a log from begin to end, in blocks; also a compressed one, with or without labels.

    Yields:
        Line numbers int64 [n] from 0, and the parsed rows.

    Raises:
        BadInputError: the file is missing, empty or truncated.
        BadRowError: a row breaks the spec (unless ``reject``).
    """
    first_line, label, rest = 0, None, b""
    for chunk in read_stream(path, block_bytes):
        text = rest + chunk
        cut = text.rfind(b"\n") + 1
        if cut:
            if label is None:
                label = _begins_with_label(text, path, spec)
            yield _numbered(text[:cut], spec, label, path, first_line, reject)
            first_line += text.count(b"\n")
        rest = text[cut:]
    if label is None and not rest:
        raise BadInputError(f"{path}: empty file", "there is nothing to read")
    if rest:
        if label is None:
            label = _begins_with_label(rest, path, spec)
        yield _numbered(rest, spec, label, path, first_line, reject)


def _numbered(
    text: bytes, spec: FeatureSpec, label: bool, source: str, first_line: int, reject: bool
) -> tuple[np.ndarray, RawRows]:
    rows = parse_rows(text, spec, label=label, reject=reject)
    if rows.bad_count and not reject:
        _raise_bad_row(rows, source, first_line + 1)
    return first_line + rows.line, rows


def read_stream(path: str, chunk_bytes: int) -> Iterator[bytes]:
    """The bytes of a file in chunks, decompressed by the ending of its name.

    Raises:
        BadInputError: it is missing, truncated, or not what its name says.
    """
    try:
        with fsspec.open(path, "rb", compression="infer") as file:
            while chunk := file.read(chunk_bytes):
                yield chunk
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file", "check the path") from None
    except IsADirectoryError:
        raise BadInputError(f"{path}: a directory", f"pass one file, as {path}/day_23") from None
    except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise BadInputError(
            f"{path}: truncated, or not what its name says: {error}", "fetch it again"
        ) from error
