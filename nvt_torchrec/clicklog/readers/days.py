"""Find the files of a log: ``day_0``, numbered or dated files in a directory, or a glob's files.

Paths may be local or remote.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.files.remote import find_filesystem
from nvt_torchrec.formats.day_names import (
    DayName,
    format_day_title,
    make_endings_pattern,
    make_natural_key,
    parse_day_name,
    parse_partition_name,
)
from nvt_torchrec.formats.feature_spec.split import BY_DAYS, Split
from nvt_torchrec.formats.splits import SPLITS

_COMPRESSED_ENDING = r"\.(?:gz|bz2|xz|zst)"
#: The first characters of names that are not data, such as ``_SUCCESS``.
_HIDDEN = ("_", ".")
#: The day of the only file of a log, if its name has no day.
_DAY_0 = DayName("day", "day_", 0)
#: The largest number of files, or missing days, that an error lists.
_MAX_SHOWN = 6

#: A file as fsspec describes it, and the day in its name.
_Named: TypeAlias = tuple[dict[str, Any], DayName]


@dataclasses.dataclass(frozen=True)
class DayFile:
    """One file of a log, which is a day unless the rows are not split by days.

    Attributes:
        day: The number in its name; for a dated file, the days since 1970-01-01.
        path: The file that is read, which may be a decompressed copy.
        size: The size of the file in bytes, as it is stored.
        source: The file that the user passed, for errors.
        modified: The time of the last change in seconds since 1970; None if the file system does
            not report it.
        compressed: Whether the file must be decompressed before it can be cut into blocks.
        title: The name of the day for users: its date, or the name of a numbered file; "" for
            others.
        split: With a split by files, the split that the file belongs to.
    """

    day: int
    path: str
    size: int
    source: str
    modified: float | None = None
    compressed: bool = False
    title: str = ""
    split: str = ""

    @property
    def name(self) -> str:
        """The name of the day in messages."""
        return self.title or f"day {self.day}"


def find_days(
    input_path: str,
    days: Collection[int] | None = None,
    *,
    after: int | None = None,
    split: Split = BY_DAYS,
    without: Collection[str] = (),
) -> list[DayFile]:
    """Return the files of a log in the order of their numbers.

    The files of a directory are ``day_0``, ``day_1.tsv``, ``day_2.csv.gz``, ``day_3.parquet`` …;
    or else numbered or dated: names with the same beginning followed by a number or a date, such as
    ``part-00017.csv`` or ``clicks-20241030.parquet``; or directories ``date=2024-10-30`` with one
    file each. If the rows are not split by days, all files below the directory are taken.

    Args:
        input_path: A directory, a glob such as ``RAW/part-*.csv``, or a file of any name, which is
            day 0 unless its name has another day.
        days: The days to take; None for all, without gaps.
        after: For a directory, take only this day, if it exists, and later ones without a gap,
            perhaps none. None to take all days.
        split: How the rows are split. By files, only the files that it names are taken, in natural
            order. If not by days, the files of a glob may have any names; those without a number
            are numbered in natural order.
        without: The paths of files that are not days, such as those of tables in the directory.

    Raises:
        BadInputError: There is no such directory, it has no days, their names are of several kinds,
            or a day is missing, empty or not unique.
    """
    if split.by == "files":
        return _find_files_of_splits(str(input_path), days, split)
    filesystem, root = find_filesystem(str(input_path))
    is_file = filesystem.isfile(root)
    named: list[_Named]
    if is_file:
        named = [(filesystem.info(root), parse_day_name(root) or _DAY_0)]
    elif filesystem.exists(root):
        named = _list_directory(filesystem, root, str(input_path), split, without)
    elif any(character in root for character in "*?["):
        matched = _match_files(filesystem, root)
        matched = [info for info in matched if _full_path(filesystem, info) not in without]
        named = _name_files(matched, str(input_path), split)
    else:
        raise BadInputError(
            f"{input_path}: no such file or directory", "pass a log: a file, a directory or a glob"
        )
    files: dict[int, DayFile] = {}
    for info, name in named:
        if days is not None and name.number not in days:
            continue
        if after is not None and name.number < after and not is_file:
            continue
        file = _make_day_file(filesystem, info, name)
        if file.day in files:
            raise BadInputError(
                f"two files for {file.name}: {files[file.day].path}, {file.path}", "remove one"
            )
        files[file.day] = file
    if not files and not days and after is not None:
        return []
    if not files and not days:
        raise BadInputError(
            f"{input_path}: no files day_0, day_1 … and no numbered or dated files",
            "make a log with `python -m etl synthesize`, or see README.md for the real one; name "
            "files such as part-0.csv or 2024-10-30.csv, pass one file, or, with a [split] by "
            f"share, column or time, a glob such as '{str(input_path).rstrip('/')}/*'",
        )
    if split.by == "days" or days is not None:
        _check_gaps(files, [name for _, name in named], days, after, str(input_path))
    return [files[day] for day in sorted(files)]


def _make_day_file(filesystem: Any, info: dict[str, Any], name: DayName) -> DayFile:
    """Return a file of a log. Raises BadInputError if it is empty or not a regular file."""
    path = _full_path(filesystem, info)
    info = filesystem.info(info["name"])  # follows links
    title = name.prefix if name.kind == "natural" else format_day_title(path)
    compressed = re.search(f"{_COMPRESSED_ENDING}$", path) is not None
    file = DayFile(name.number, path, info["size"], path, info.get("mtime"), compressed, title)
    if not info["size"]:
        what = "empty file" if info["type"] == "file" else "not a regular file"
        raise BadInputError(f"{path}: {what}", f"fetch {file.name} again, or remove it")
    return file


def _check_gaps(
    files: dict[int, DayFile],
    names: list[DayName],
    days: Collection[int] | None,
    after: int | None,
    input_path: str,
) -> None:
    """Check that no day is missing.

    Args:
        files: The chosen days, by number.
        names: The names of all days of the log.
        days: The requested days; None for all from the first one on.
        after: The day after which all days are needed; None without one.
        input_path: The log, for errors.

    Raises:
        BadInputError: A day is missing.
    """
    expected: Iterable[int]
    if days is not None:
        expected = sorted(days)
    elif after is not None:
        expected = range(after + 1, max(files) + 1)
    else:
        expected = range(min(files, default=0), max(files) + 1)
    # An extra digit in a name can leave a gap of millions of days, so only a few are listed.
    absent = (day for day in expected if day not in files)
    missing = list(itertools.islice(absent, _MAX_SHOWN + 1))
    if not missing:
        return
    name = names[0] if names else _DAY_0
    listed = _list_some([name.format_name(day) for day in missing])
    remedy = "add the files"
    present = {*files} or {other.number for other in names}
    if present:
        remedy += f", or choose the existing days with --days {name.format_flag(present)}"
    raise BadInputError(f"{input_path}: missing {listed}", remedy)


def _match_files(filesystem: Any, pattern: str) -> list[dict[str, Any]]:
    """Return the files that a glob matches, in natural order."""
    try:
        matched = [filesystem.info(path) for path in filesystem.glob(pattern)]
    except ValueError as error:  # a pattern that fsspec refuses
        raise BadInputError(f"{pattern}: {error}", "correct the pattern") from None
    files = [info for info in matched if info["type"] != "directory"]
    return sorted(files, key=lambda info: make_natural_key(info["name"]))


def find_table(path: str) -> list[DayFile]:
    """Return the files of a table, given by a path or a glob, in natural order.

    Raises:
        BadInputError: There is no file, or a file is empty.
    """
    filesystem, root = find_filesystem(path)
    files = _match_files(filesystem, root)
    if not files:
        raise BadInputError(f"{path}: no such file", "correct the path of the table")
    named = _number_files(files)
    return [_make_day_file(filesystem, info, name) for info, name in named]


def find_directory(input_path: str) -> str:
    """Return the directory of a log, which may be a directory, a file or a glob."""
    filesystem, root = find_filesystem(input_path)
    if filesystem.isdir(root):
        return input_path.rstrip("/")
    names = input_path.split("/")
    patterns = [i for i, name in enumerate(names) if any(sign in name for sign in "*?[")]
    parents = names[: patterns[0]] if patterns else names[:-1]
    return "/".join(parents) or ("/" if input_path.startswith("/") else ".")


def _full_path(filesystem: Any, info: dict[str, Any]) -> str:
    """Return the path of a file, with its protocol if it is remote."""
    return filesystem.unstrip_protocol(info["name"]).removeprefix("file://")


def _list_directory(
    filesystem: Any, root: str, input_path: str, split: Split, without: Collection[str]
) -> list[_Named]:
    """Return the files of a directory that are days, with the days in their names.

    If there are no ``day_0`` …, and rows are not split by days, these are all data files below the
    directory, at any depth.
    """
    days: list[_Named] = []
    others: list[_Named] = []
    for info in filesystem.ls(root, detail=True):
        if _full_path(filesystem, info) in without:
            continue
        if info["type"] == "directory":
            partition = parse_partition_name(_last_name(info)) if split.by == "days" else None
            if partition:
                others.append((_find_only_file(filesystem, info["name"]), partition))
            continue
        name = parse_day_name(_last_name(info))  # files and links
        if name and name.kind == "day":
            days.append((info, name))
        elif name:
            others.append((info, name))
    if days:
        return days
    if split.by == "days":
        _check_alike(others, input_path)
        return others
    files = []
    for info in filesystem.find(root, detail=True).values():
        is_excluded = _full_path(filesystem, info) in without
        if _is_data(info["name"].removeprefix(root)) and not is_excluded:
            files.append(info)
    files.sort(key=lambda info: make_natural_key(info["name"]))
    return _name_files(files, input_path, split) if files else []


def _is_data(path: str) -> bool:
    """Return whether a path below the input can be a file of the log; ``_SUCCESS`` cannot."""
    names = path.strip("/").split("/")
    if any(name.startswith(_HIDDEN) for name in names):
        return False
    has_ending = re.fullmatch(
        rf".*\.(?:{make_endings_pattern()})(?:{_COMPRESSED_ENDING})?", names[-1]
    )
    return has_ending is not None or parse_day_name(path) is not None


def _find_only_file(filesystem: Any, directory: str) -> dict[str, Any]:
    """Return the file in a directory such as ``date=2024-10-30``.

    Raises:
        BadInputError: There is none, or more than one.
    """
    listed = filesystem.ls(directory, detail=True)
    files = (info for info in listed if info["type"] != "directory")
    data = [info for info in files if not _last_name(info).startswith(_HIDDEN)]
    if len(data) != 1:
        raise BadInputError(
            f"{directory}: expected one file for a day, found {len(data)}",
            "join them; or split by share, column or time, which reads all files below the input",
        )
    return data[0]


def _name_files(files: list[dict[str, Any]], input_path: str, split: Split) -> list[_Named]:
    """Return files with the days in their names, or numbered in this order.

    Raises:
        BadInputError: Rows are split by days, and not all names have a number or date of one kind.
    """
    if not files:
        raise BadInputError(f"{input_path}: no file matches", "check the directory and the pattern")
    known: list[_Named] = []
    unknown: list[str] = []
    for info in files:
        name = parse_day_name(info["name"])
        if name:
            known.append((info, name))
        else:
            unknown.append(info["name"])
    if split.by == "days":
        if unknown:
            raise BadInputError(
                f"{input_path}: no number or date in {_list_some(unknown)}",
                "days need one: rename the files or narrow the pattern; a new run may split by "
                "share, column, time or files",
            )
        _check_alike(known, input_path)
        return known
    kinds = {(name.kind, name.prefix) for _, name in known}
    numbers = {name.number for _, name in known}
    if len(kinds) == 1 and len(numbers) == len(files):
        return known
    return _number_files(files)


def _number_files(files: list[dict[str, Any]]) -> list[_Named]:
    """Return files numbered in this order, whatever their names."""
    return [(info, DayName("natural", _last_name(info), i)) for i, info in enumerate(files)]


def _check_alike(named: list[_Named], input_path: str) -> None:
    """Raise BadInputError for names of several kinds."""
    examples: dict[tuple[str, str], str] = {}
    for info, name in sorted(named, key=lambda pair: make_natural_key(pair[0]["name"])):
        examples.setdefault((name.kind, name.prefix), _last_name(info))
    if len(examples) > 1:
        raise BadInputError(
            f"{input_path}: names of several kinds: {_list_some(list(examples.values()))}",
            "pass a glob that matches those to read, such as 'RAW/part-*.csv'",
        )


def _list_some(names: list[str]) -> str:
    """Format names for an error; only the first ones of many."""
    listed = ", ".join(names[:_MAX_SHOWN])
    return f"{listed} …" if len(names) > _MAX_SHOWN else listed


def _find_files_of_splits(
    input_path: str, days: Collection[int] | None, split: Split
) -> list[DayFile]:
    """Return the files that a split by files names, those for training first.

    Raises:
        SettingsError: Days were chosen.
        BadInputError: There is no such directory, a pattern matches no file, or a file belongs to
            two splits.
    """
    if days is not None:
        raise SettingsError(
            "--days with a split by files", "name the files in the [split] of the spec"
        )
    filesystem, root = find_filesystem(input_path)
    if not filesystem.isdir(root):
        raise BadInputError(
            f"{input_path}: not a directory, but the split of the spec names files in one",
            "pass the directory of these files",
        )
    files: dict[str, DayFile] = {}
    for name in SPLITS:
        for pattern in getattr(split, f"{name}_files"):
            matched = _match_files(filesystem, f"{root.rstrip('/')}/{pattern}")
            if not matched:
                present = [_last_name(info) for info in filesystem.ls(root, detail=True)]
                listed = _list_some(sorted(present, key=make_natural_key))
                raise BadInputError(
                    f"{input_path}: {name} = {pattern!r} matches no file; there are {listed}",
                    "correct the [split] of the spec",
                )
            for info in matched:
                file = _make_day_file(filesystem, info, DayName("natural", _last_name(info), 0))
                first = files.setdefault(file.path, dataclasses.replace(file, split=name))
                if first.split != name:
                    raise BadInputError(
                        f"{file.path}: belongs to {first.split} and to {name}",
                        "make the patterns in the [split] of the spec exclude each other",
                    )
    ordered = sorted(
        files.values(), key=lambda file: (SPLITS.index(file.split), make_natural_key(file.path))
    )
    return [dataclasses.replace(file, day=i) for i, file in enumerate(ordered)]


def _last_name(info: dict[str, Any]) -> str:
    """Return the last name of a path."""
    return info["name"].rstrip("/").rsplit("/", 1)[-1]
