"""Sample the first rows of a log: its format, columns and their profiles."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import is_list, is_text, to_bytes_type
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.remote import find_filesystem
from nvt_torchrec.clicklog.readers import READERS, load_reader
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.clicklog.readers.lines import read_stream
from nvt_torchrec.clicklog.readers.table_rows import parse_partition_values
from nvt_torchrec.clicklog.text.line_layout import check_text
from nvt_torchrec.etl.guess.dialect import (
    Dialect,
    decode,
    find_dialect,
    find_quoted_breaks,
    has_header,
    split_rows,
)
from nvt_torchrec.etl.guess.names import find_split_path
from nvt_torchrec.etl.guess.values import DECLARED, Profile, make_vector, profile
from nvt_torchrec.formats.day_names import parse_day_name
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS
from nvt_torchrec.formats.feature_spec.split import ANY_FILES
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.vectors import MAX_WIDTH

#: Maximum number of rows in a sample.
HEAD_ROWS = 50_000
#: Names of files that are parts of one table, as Spark and others write them, and not days.
_PARTS = re.compile(r"(part|shard|chunk|split|fold|file|data)[-_][^/]*$", re.IGNORECASE)
#: The name of a column with its declared type, such as ``user_id:token``.
_TYPED = re.compile(rf"(.+):({'|'.join(DECLARED)})")
#: Bytes to read of the files for valid and test, for the names of their columns.
_HEADER_BYTES = 1 << 20
#: Endings of a text whose last line is empty.
_EMPTY_LINE = (b"\n\n", b"\n\r\n")


@dataclasses.dataclass(frozen=True)
class SampledFile:
    """A sample of the first rows of a log.

    Attributes:
        columns: The columns, in the order of the file.
        whole: Whether the sample has all rows of the log.
        input: The keys of ``[input]``, in the order in which they are written.
        positional: Whether the spec names columns by position.
        malformed: The number of sampled rows with too many or too few fields.
        quoted_breaks: The number of sampled lines that end within quotes.
        days: The directory or glob whose files are days, including the sampled file; "" if the
            files are not days.
        day_files: The number of these files.
        file: The sampled file.
        splits: By split, the files that are named for it, relative to ``root``; {} if none are.
        split_columns: By split, the columns of the first of its files.
        root: The directory of the files of ``splits``.
    """

    columns: list[Profile]
    whole: bool
    input: dict[str, Any]
    positional: bool = False
    malformed: int = 0
    quoted_breaks: int = 0
    days: str = ""
    day_files: int = 0
    file: str = ""
    splits: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    split_columns: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    root: str = ""

    @property
    def named(self) -> bool:
        """Whether the file names its columns."""
        return any(column.name for column in self.columns)

    def has_labels(self, split: str, labels: list[Profile]) -> bool:
        """Return True if the files of a split have the columns of the labels."""
        columns = self.split_columns[split]
        if not self.named:
            return len(columns) == len(self.columns)
        return {label.source for label in labels} <= set(columns)


def take_sample(path: str, head_bytes: int, delimiter: str = "") -> SampledFile:
    """Sample the first file of a log, or its first file for training.

    Args:
        path: A file, text (also compressed) or a table, or a directory or glob of such files; local
            or a URL.
        head_bytes: The number of bytes of text to read from the beginning.
        delimiter: The delimiter between the fields of text; "" to detect it.

    Raises:
        BadInputError: The file is missing or empty, has an unknown format, or has only one column.
    """
    root, splits = _find_split_files(path)
    if not splits:
        files, days, day_files = _find_files(path)
        sample = _read_sample(files, head_bytes, delimiter)
        return dataclasses.replace(sample, days=days, day_files=day_files)
    files = [f"{root}/{name}" for name in splits["train"]]
    sample = _read_sample(files, head_bytes, delimiter)
    columns = {"train": [column.source for column in sample.columns]}
    for split in splits.keys() - {"train"}:
        head = _read_sample([f"{root}/{splits[split][0]}"], _HEADER_BYTES, delimiter)
        columns[split] = [column.source for column in head.columns]
    return dataclasses.replace(sample, whole=False, splits=splits, split_columns=columns, root=root)


def _find_split_files(path: str) -> tuple[str, dict[str, list[str]]]:
    """Return a directory, and its files by the split that their names say.

    Without files for training and for at least one other split, it is "" and {}.
    """
    filesystem, name = find_filesystem(path)
    splits: dict[str, list[str]] = {}
    if filesystem.isfile(name):
        return "", splits
    root = path.rstrip("/")
    if not filesystem.isdir(name):  # a glob
        root = path.rpartition("/")[0] or "."
    filesystem, name = find_filesystem(root)
    base = filesystem.unstrip_protocol(name).removeprefix("file://").rstrip("/")
    with contextlib.suppress(BadInputError):
        for file in find_days(path, split=ANY_FILES):
            below = file.path.removeprefix(f"{base}/")
            split = find_split_path(below)
            if split:
                splits.setdefault(split, []).append(below)
    if "train" not in splits or len(splits) == 1:
        return "", {}
    return root, {split: splits[split] for split in SPLITS if split in splits}


def _read_sample(files: list[str], head_bytes: int, delimiter: str) -> SampledFile:
    """Sample the first of the files of a log, in its format or as text."""
    head, whole = _read_head(files[0], head_bytes)
    format_name = ""
    for name in READERS:
        if load_reader(name).recognizes(files[0], head):
            format_name = name
            break
    if not format_name:
        check_text(head, files[0])
    if not format_name or INPUT_FORMATS[format_name].lines:
        end = len(head) if whole else head.rfind(b"\n", 0, head_bytes) + 1
        if head and not end:
            raise BadInputError(
                f"{files[0]}: the first line does not end within {head_bytes >> 20} MiB",
                "set a larger --head_mb",
            )
        head = head[:end]
        if not head.strip():
            raise BadInputError(f"{files[0]}: empty file", "pass a file with rows")
    if format_name:
        sample = _sample_format(format_name, files, head, whole)
    else:
        sample = _sample_text(files[0], head, whole, delimiter)
    return dataclasses.replace(sample, whole=sample.whole and len(files) == 1, file=files[0])


def _find_files(path: str) -> tuple[list[str], str, int]:
    """Find the files of a log, and the days that they belong to.

    Returns:
        The files, the directory or glob of the days ("" if the files are not days), and the number
        of days.

    Raises:
        BadInputError: There are no files.
    """
    filesystem, name = find_filesystem(path)
    if not filesystem.isfile(name):
        days = _list_days(path)
        if days:
            return days, path, len(days)
        return [file.path for file in find_days(path, split=ANY_FILES)], "", 0
    day = parse_day_name(path)
    if not day:
        return [path], "", 0
    directory, _, file_name = path.rpartition("/")
    if day.prefix.endswith("="):  # date=2024-10-30/part.parquet
        directory = directory.rpartition("/")[0]
    directory = directory or "."
    for days_path in (directory, f"{directory}/{day.prefix}[0-9]*"):
        days = _list_days(days_path)
        if any(other.endswith(f"/{file_name}") for other in days):
            return [path], days_path, len(days)
    return [path], "", 0


def _list_days(path: str) -> list[str]:
    """Return the files of a directory or glob if they are at least two days; else []."""
    with contextlib.suppress(BadInputError):
        days = [file.path for file in find_days(path)]
        if len(days) > 1 and not _PARTS.search(days[0]):
            return days
    return []


def _read_head(path: str, head_bytes: int) -> tuple[bytes, bool]:
    """Return the beginning of a file, and whether that is the whole file.

    A path that is not a file, such as a table that is a directory, has no beginning.
    """
    filesystem, name = find_filesystem(path)
    if not filesystem.isfile(name):
        return b"", True
    head = b""
    for chunk in read_stream(path, head_bytes):
        head += chunk
        if len(head) > head_bytes:
            return head, False
    return head, True


def _sample_text(path: str, head: bytes, whole: bool, delimiter: str) -> SampledFile:
    """Sample text with delimiters, given the whole lines of its head."""
    text, encoding = decode(head, path)
    dialect = find_dialect(text, path, delimiter)
    rows = split_rows(text, dialect)
    header = has_header(rows)
    names = [""] * dialect.fields
    if header:
        names = [field.strip(" \t") for field in rows.pop(0)]
    if not rows:
        raise BadInputError(f"{path}: a header and no rows", "pass a file with rows")
    whole = whole and len(rows) <= HEAD_ROWS
    rows = rows[:HEAD_ROWS]
    well_formed = [row for row in rows if len(row) == dialect.fields]
    columns = list(zip(*well_formed, strict=True))
    unique_names = make_unique(names)
    by_name = header and unique_names == names
    profiles = []
    for name, values in zip(unique_names, columns, strict=True):
        typed = _TYPED.fullmatch(name) if by_name else None
        if typed:
            column = profile(values, typed[1], declared=typed[2])
            profiles.append(dataclasses.replace(column, header=name))
        else:
            profiles.append(profile(values, name))
    if header and not by_name:
        dialect = dataclasses.replace(dialect, skip_lines=dialect.skip_lines + 1)
    keys = _make_input_keys(dialect, encoding, by_name, whole and head.endswith(_EMPTY_LINE))
    profiles = _keep_one_separator(profiles, keys)
    malformed = len(rows) - len(well_formed)
    breaks = len(find_quoted_breaks(text, dialect.delimiter)) if malformed else 0
    return SampledFile(profiles, whole, keys, not by_name, malformed, breaks)


def make_spec_name(name: str) -> str:
    """Return a name that is valid for a column of a spec and for an embedding table."""
    letters = [c if c.isprintable() and c not in "/." else "_" for c in name]
    return "".join(letters) or "column"


def make_unique(names: list[str]) -> list[str]:
    """Return names without repetitions: the second ``a`` becomes ``a_2``; "" may repeat."""
    result: list[str] = []
    for name in names:
        candidate = name
        number = 2
        while name and candidate in result:
            candidate = f"{name}_{number}"
            number += 1
        result.append(candidate)
    return result


def _keep_one_separator(profiles: list[Profile], keys: dict[str, Any]) -> list[Profile]:
    """Choose the separator of the lists in a file, and mark lists with another one as unread.

    A spec has one ``list_separator``, which is added to ``keys``.
    """
    used = [column.separator for column in profiles if column.separator]
    best = max(sorted(set(used)), key=used.count, default="|")
    if best == keys.get("delimiter"):
        best = "|" if best == ";" else ";"
    if best != "|":
        keys["list_separator"] = best
    why = f"its lists have another separator than {best}, and a file has one list_separator"
    kept = []
    for column in profiles:
        if column.separator not in ("", best):
            column = dataclasses.replace(column, kind="empty", unread=why, width=0)
        kept.append(column)
    return kept


def _make_input_keys(
    dialect: Dialect, encoding: str, header: bool, empty_end: bool
) -> dict[str, Any]:
    """Return the keys of ``[input]`` that differ from the defaults."""
    csv = dialect.quoted or dialect.delimiter != "\t"
    keys = {
        "format": "csv" if csv else "",
        "delimiter": dialect.delimiter if csv else "",
        "encoding": encoding,
        "skip_lines": dialect.skip_lines,
        "skip_empty_lines": empty_end,
    }
    defaults = {"encoding": "utf-8", "delimiter": ","}
    keys = {key: value for key, value in keys.items() if value and value != defaults.get(key)}
    if header != csv:  # by default csv has a header, tab-separated text has none
        keys["header"] = header
    return keys


def _sample_format(name: str, files: list[str], head: bytes, whole: bool) -> SampledFile:
    """Sample a file of a format that names its columns."""
    kind = INPUT_FORMATS[name]
    sample = load_reader(name).sample(files[0], head, HEAD_ROWS)
    if not len(sample.table) and not kind.lines:
        raise BadInputError(f"{files[0]}: no rows", "pass a file with rows")
    keys: dict[str, Any] = {"format": name}
    if kind.lines and whole and head.endswith(_EMPTY_LINE):
        keys["skip_empty_lines"] = True
    profiles = _profile_table(sample.table, files, keys)
    # Only formats of lines were read from the head alone.
    all_rows = sample.whole and (whole or not kind.lines)
    return SampledFile(profiles, all_rows, keys, malformed=sample.malformed)


def _profile_table(table: pa.Table, files: list[str], keys: dict[str, Any]) -> list[Profile]:
    """Return the profiles of a table's columns, including partition columns in the paths."""
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    names = table.schema.names
    profiles = []
    for name, column in zip(names, table.columns, strict=True):
        if names.count(name) == 1:
            profiles.append(_profile_array(column.combine_chunks(), name))
    repeated = {name for name in names if names.count(name) > 1}
    for name in sorted(repeated):
        profiles.append(_leave_unread(name, len(table), "several columns have this name"))
    partitions = [parse_partition_values(path) for path in files]
    for name in set.intersection(*map(set, partitions)) - set(names):
        values = [partitions[i % len(files)][name] or "" for i in range(max(len(table), 1))]
        profiles.append(profile(values, name, lists=False))
    return _keep_one_separator(profiles, keys)


def _leave_unread(name: str, rows: int, why: str) -> Profile:
    """Return the profile of a column that cannot be read."""
    return Profile(name, "empty", rows, Counter(), unread=why)


def _profile_array(array: pa.Array, name: str) -> Profile:
    """Return the profile of a column of a table by its type and values."""
    types = pa.types
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    data_type = array.type
    if is_list(data_type):
        return _profile_lists(array, name)
    is_time = types.is_timestamp(data_type) or types.is_date(data_type)
    is_fraction = types.is_floating(data_type) or types.is_decimal(data_type)
    is_number = is_fraction or types.is_integer(data_type) or types.is_boolean(data_type)
    if not (is_time or is_number or is_text(data_type) or types.is_null(data_type)):
        return _leave_unread(name, len(array), f"columns of type {data_type} are not read")
    if types.is_boolean(data_type):
        array = array.cast(pa.uint8())
    if types.is_floating(data_type):
        array = pc.if_else(pc.is_nan(array), None, array)
    if types.is_timestamp(data_type):
        # Drop the time zone, so that times are in UTC: converting needs a time zone database, which
        # not every machine has.
        array = array.cast(pa.timestamp(data_type.unit))
    texts = array if is_text(data_type) else array.cast(pa.string())
    # Through bytes, because text in a file may not be valid UTF-8.
    values = texts.cast(pa.large_binary()).to_pylist()
    decoded = [value.decode("utf-8", "replace") if value else "" for value in values]
    column = profile(decoded, name, lists=is_text(data_type))
    if types.is_boolean(data_type) and column.counts:
        return dataclasses.replace(column, kind="bool")
    if is_text(data_type) and column.is_number:
        return dataclasses.replace(column, kind="string")
    if is_fraction:  # pandas writes integer ids as floats if some are missing
        reading = {key: value for key, value in column.reading.items() if key != "lenient"}
        return dataclasses.replace(column, reading=reading, floating=True)
    return column


def _find_width(array: pa.Array) -> int:
    """Return the common length of non-empty lists of floats; 0 if they are no vectors."""
    if not pa.types.is_floating(array.type.value_type):
        return 0
    lengths = pc.unique(pc.list_value_length(array)).to_pylist()
    widths = [length for length in lengths if length]
    return widths[0] if len(widths) == 1 and 2 <= widths[0] <= MAX_WIDTH else 0


def _profile_lists(array: pa.Array, name: str) -> Profile:
    """Return the profile of a column of lists."""
    list_type = array.type
    items = pc.list_flatten(array)
    if pa.types.is_nested(list_type.value_type):
        return _leave_unread(name, len(array), f"columns of type {list_type} are not read")
    width = _find_width(array)
    if width and not items.null_count:
        vectors = make_vector(name, len(array), len(array) - len(items) // width, width)
        return dataclasses.replace(vectors, half=pa.types.is_float16(list_type.value_type))
    column = _profile_array(items, name)
    if items.null_count:
        why = f"its lists hold nulls: remove them, in SQL by filter({name}, x -> x is not null)"
        return _leave_unread(name, len(array), why)
    if column.kind == "float" or (column.floating and column.kind != "int"):
        return _leave_unread(name, len(array), f"columns of type {list_type} are not read")
    # The rows and codes are those of whole lists, the kind and the counts those of their items.
    rows = array.cast(to_bytes_type(list_type)).to_pylist()
    texts = [str(row) if row else "" for row in rows]
    lists = profile(texts, name, lists=False)
    kind = column.kind if column.kind in ("int", "hex32") else "string"
    return dataclasses.replace(lists, kind=kind, counts=column.counts, reading={}, multi_hot=True)
