"""Find the files of a log: ``day_0``, numbered or dated files of a directory, or those of a glob.

Paths may be local or remote.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable
from typing import Any

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.files.remote import filesystem_of
from nvt_torchrec.formats.day_names import (
    DayName,
    data_endings,
    day_title,
    name_of,
    natural_order,
    partition_name,
)
from nvt_torchrec.formats.feature_spec.split import BY_DAYS, Split
from nvt_torchrec.formats.splits import SPLITS

_COMPRESSED = re.compile(r".*\.(?:gz|bz2|xz|zst)")
#: How names begin that are no data.
_HIDDEN = ("_", ".")
#: What a file of another name is, if it is the only one.
_DAY_0 = DayName("day", "day_", 0)
#: Files, and missing days, that an error lists.
_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class DayFile:
    """One file of a log: a day, unless rows are split otherwise.

    Attributes:
        day: Its number, from its name; of a dated file, the days since 1970-01-01.
        path: Where its bytes are.
        size: Bytes of the file as it is stored.
        source: The file as the user knows it; ``path`` may be a decompressed copy.
        modified: Seconds since 1970, or None if the file system does not report it.
        compressed: Whether the file must be decompressed before it can be cut into blocks.
        title: How the user knows the day: its date, or the name of a numbered file; "" for others.
        split: With a split by files, the one that this file is for.
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
        """The day as messages name it."""
        return self.title or f"day {self.day}"


def find_days(
    input_path: str,
    days: Collection[int] | None = None,
    *,
    after: int | None = None,
    split: Split = BY_DAYS,
    without: Collection[str] = (),
) -> list[DayFile]:
    """Return the files of a log by number; one file is a log of one day.

    The files of a directory are ``day_0``, ``day_1.tsv``, ``day_2.csv.gz``, ``day_3.parquet`` …;
    or else numbered or dated: names with the same beginning, then a number or a date, such as
    ``part-00017.csv`` or ``clicks-20241030.parquet``; or directories ``date=2024-10-30`` of one
    file each. If the rows are not split by days, they may be any files below the directory.

    Args:
        input_path: A directory, a glob such as ``RAW/part-*.csv``, or a file of any name, which is
            day 0 unless its name says otherwise.
        days: The days to take; None: all, between which no day may be missing.
        after: Of a directory, take only this day, if it is there, and later ones, of which there
            may be none; the next day must be the first of them. None: any days.
        split: How the rows are split. If by files, only those that it names are taken, in natural
            order. If not by days, the files of a glob may have any names, and are numbered in
            natural order where these tell no number.
        without: Paths of files that are no days, such as those of tables in the same directory.

    Raises:
        BadInputError: There is no such directory, it has no days, their names are of several kinds,
            or a day is missing, empty or there twice.
    """
    if split.by == "files":
        return _files_of_splits(str(input_path), days, split)
    filesystem, root = filesystem_of(str(input_path))
    one_file = filesystem.isfile(root)
    named: list[tuple[Any, DayName]]
    if one_file:
        named = [(filesystem.info(root), name_of(root) or _DAY_0)]
    elif filesystem.exists(root):
        named = _listed(filesystem, root, str(input_path), split, without)
    elif any(character in root for character in "*?["):
        matched = _glob(filesystem, root)
        matched = [info for info in matched if _path(filesystem, info) not in without]
        named = _named(matched, str(input_path), split)
    else:
        raise BadInputError(
            f"{input_path}: no such file or directory", "pass a log: a file, a directory or a glob"
        )
    files: dict[int, DayFile] = {}
    for info, name in named:
        if days is not None and name.number not in days:
            continue
        if after is not None and name.number < after and not one_file:
            continue
        file = _day_file(filesystem, info, name)
        if file.day in files:
            raise BadInputError(
                f"{file.name} is there twice: {files[file.day].path}, {file.path}", "remove one"
            )
        files[file.day] = file
    if not files and not days and after is not None:
        return []
    if not files and not days:
        raise BadInputError(
            f"{input_path}: no files day_0, day_1 … in it, and no numbered or dated ones",
            "make a log with `python -m etl synthesize`, or see README.md for the real one; name "
            "files such as part-0.csv or 2024-10-30.csv, pass one file, or, with a [split] by "
            f"share, column or time, a glob such as '{str(input_path).rstrip('/')}/*'",
        )
    if split.by == "days" or days is not None:
        _check_gaps(files, [name for _, name in named], days, after, str(input_path))
    return [files[day] for day in sorted(files)]


def _day_file(filesystem: Any, info: dict[str, Any], name: DayName) -> DayFile:
    path = _path(filesystem, info)
    info = filesystem.info(info["name"])  # of the target, if it is a link
    title = name.prefix if name.kind == "natural" else day_title(path)
    packed = _COMPRESSED.fullmatch(path) is not None
    file = DayFile(name.number, path, info["size"], path, info.get("mtime"), packed, title)
    if not info["size"]:
        what = "empty file" if info["type"] == "file" else "not a regular file"
        raise BadInputError(f"{path}: {what}", f"fetch {file.name} again, or leave it out")
    return file


def _check_gaps(
    files: dict[int, DayFile],
    names: list[DayName],
    days: Collection[int] | None,
    after: int | None,
    input_path: str,
) -> None:
    """Check that no day is missing."""
    name = names[0] if names else _DAY_0
    there = {*files} or {other.number for other in names}
    wanted: Iterable[int]
    if days is None:
        wanted = range(min(files, default=0) if after is None else after + 1, max(files) + 1)
    else:
        wanted = sorted(days)
    # a number too many in a name may leave a gap of millions
    missing = list(itertools.islice((day for day in wanted if day not in files), _SHOWN + 1))
    if missing:
        listed = ", ".join(name.other(day) for day in missing[:_SHOWN])
        more = " …" if len(missing) > _SHOWN else ""
        choose = f", or choose what is there with --days {name.flag(there)}" if there else ""
        raise BadInputError(f"{input_path}: missing {listed}{more}", f"add the files{choose}")


def _glob(filesystem: Any, pattern: str) -> list[dict[str, Any]]:
    """Return the files that a glob matches, in natural order."""
    try:
        matched = [filesystem.info(path) for path in filesystem.glob(pattern)]
    except ValueError as error:  # of a pattern
        raise BadInputError(f"{pattern}: {error}", "correct the pattern") from None
    files = [info for info in matched if info["type"] != "directory"]
    return sorted(files, key=lambda info: natural_order(info["name"]))


def find_table(path: str) -> list[DayFile]:
    """Return the files of a table that a path or a glob names, in natural order.

    Raises:
        BadInputError: There is none, or one is empty.
    """
    filesystem, root = filesystem_of(path)
    files = _glob(filesystem, root)
    if not files:
        raise BadInputError(f"{path}: no such file", "correct the path of the table")
    return [
        _day_file(filesystem, info, DayName("natural", _last(info), i))
        for i, info in enumerate(files)
    ]


def directory_of(input_path: str) -> str:
    """Return the directory of a log, which may be a directory, a file or a glob."""
    filesystem, root = filesystem_of(input_path)
    if filesystem.isdir(root):
        return input_path.rstrip("/")
    names = input_path.split("/")
    patterns = [i for i, name in enumerate(names) if any(sign in name for sign in "*?[")]
    parents = names[: patterns[0]] if patterns else names[:-1]
    return "/".join(parents) or ("/" if input_path.startswith("/") else ".")


def _path(filesystem: Any, info: dict[str, Any]) -> str:
    """Return the path of a file, with its protocol if it is remote."""
    return filesystem.unstrip_protocol(info["name"]).removeprefix("file://")


def _listed(
    filesystem: Any, root: str, input_path: str, split: Split, without: Collection[str]
) -> list[tuple[dict[str, Any], DayName]]:
    """Return the files of a directory that are days, with their names.

    If there are no ``day_0`` …, and rows are not split by days, these are all files with data below
    it, however deep.
    """
    days: list[tuple[dict[str, Any], DayName]] = []
    others: list[tuple[dict[str, Any], DayName]] = []
    for info in filesystem.ls(root, detail=True):
        if _path(filesystem, info) in without:
            continue
        last = _last(info)
        if info["type"] == "directory":
            partition = partition_name(last) if split.by == "days" else None
            if partition:
                others.append((_only_file(filesystem, info["name"]), partition))
            continue
        name = name_of(last)  # links are files too
        if name:
            (days if name.kind == "day" else others).append((info, name))
    if days:
        return days
    if split.by != "days":
        below = filesystem.find(root, detail=True).values()
        files = [
            info
            for info in below
            if _is_data(info["name"].removeprefix(root)) and _path(filesystem, info) not in without
        ]
        files.sort(key=lambda info: natural_order(info["name"]))
        return _named(files, input_path, split) if files else []
    _check_alike(others, input_path)
    return others


def _is_data(path: str) -> bool:
    """Whether a path below the input may be a file of the log, unlike ``_SUCCESS``."""
    names = path.strip("/").split("/")
    data = rf".*\.(?:{data_endings()})(?:\.(?:gz|bz2|xz|zst))?"
    hidden = any(name.startswith(_HIDDEN) for name in names)
    return not hidden and (re.fullmatch(data, names[-1]) or name_of(path)) is not None


def _only_file(filesystem: Any, directory: str) -> dict[str, Any]:
    """Return the file in a directory such as ``date=2024-10-30``."""
    listed = filesystem.ls(directory, detail=True)
    files = (info for info in listed if info["type"] != "directory")
    data = [info for info in files if not _last(info).startswith(_HIDDEN)]
    if len(data) != 1:
        raise BadInputError(
            f"{directory}: {len(data)} files, where a day is one file",
            "join them; or split by share, column or time, which reads all files below the input",
        )
    return data[0]


def _named(
    files: list[dict[str, Any]], input_path: str, split: Split
) -> list[tuple[dict[str, Any], DayName]]:
    """Return the files of a glob with what their names say."""
    if not files:
        raise BadInputError(f"{input_path}: no file matches", "check the directory and the pattern")
    names = [name_of(info["name"]) for info in files]
    known = [(info, name) for info, name in zip(files, names, strict=True) if name]
    if split.by == "days":
        unknown = [info["name"] for info, name in zip(files, names, strict=True) if not name]
        if unknown:
            raise BadInputError(
                f"{input_path}: no number or date in {_shown(unknown)}",
                "days need one: rename the files or narrow the pattern; a new run may split by "
                "share, column, time or files",
            )
        _check_alike(known, input_path)
        return known
    kinds = {(name.kind, name.prefix) for _, name in known}
    if len(kinds) == 1 and len({name.number for _, name in known}) == len(files):
        return known
    return [(info, DayName("natural", _last(info), i)) for i, info in enumerate(files)]


def _check_alike(named: list[tuple[dict[str, Any], DayName]], input_path: str) -> None:
    """Refuse names of several kinds."""
    first: dict[tuple[str, str], str] = {}
    for info, name in sorted(named, key=lambda pair: natural_order(pair[0]["name"])):
        first.setdefault((name.kind, name.prefix), _last(info))
    if len(first) > 1:
        raise BadInputError(
            f"{input_path}: names of several kinds: {_shown(list(first.values()))}",
            "pass a glob that matches those to read, such as 'RAW/part-*.csv'",
        )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")


def _files_of_splits(input_path: str, days: Collection[int] | None, split: Split) -> list[DayFile]:
    """Return the files that a split by files names, those for training first."""
    if days is not None:
        raise SettingsError(
            "--days with a split by files", "name the files in the [split] of the spec"
        )
    filesystem, root = filesystem_of(input_path)
    if not filesystem.isdir(root):
        raise BadInputError(
            f"{input_path}: no directory, and the spec's split names files in one",
            "pass the directory of these files",
        )
    files: dict[str, DayFile] = {}
    for name in SPLITS:
        for pattern in getattr(split, f"{name}_files"):
            matched = _glob(filesystem, f"{root.rstrip('/')}/{pattern}")
            if not matched:
                listed = map(_last, filesystem.ls(root, detail=True))
                there = _shown(sorted(listed, key=natural_order))
                raise BadInputError(
                    f"{input_path}: {name} = {pattern!r} matches no file; there are {there}",
                    "correct the [split] of the spec",
                )
            for info in matched:
                file = _day_file(filesystem, info, DayName("natural", _last(info), 0))
                first = files.setdefault(file.path, dataclasses.replace(file, split=name))
                if first.split != name:
                    raise BadInputError(
                        f"{file.path}: is for {first.split} and for {name}",
                        "make the patterns in the [split] of the spec exclude each other",
                    )
    ordered = sorted(
        files.values(), key=lambda file: (SPLITS.index(file.split), natural_order(file.path))
    )
    return [dataclasses.replace(file, day=i) for i, file in enumerate(ordered)]


def _last(info: dict[str, Any]) -> str:
    """Return the last name of a path."""
    return info["name"].rstrip("/").rsplit("/", 1)[-1]
