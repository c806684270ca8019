"""Versioned JSON files of this project that list other files with their digests.

A saved workflow, its compiled form, a bundle, a checkpoint and the manifest of a run each have one
such file. It is written last, so a directory without it is incomplete. A file that is read is
checked before it is used: the format, the version and every type. Of the files that it lists, the
paths and sizes are checked, and the digests if asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SchemaError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.validation import parse, resolve_inside
from nvt_torchrec.base.threads import count_cores, map_in_order

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        name: The value of the key ``format``; "" for files without this key.
        version: The version that this program writes and reads.
        what: The name of the kind in errors, with its article.
        version_key: The key of the version.
        digest_key: The key of the digest of the rest of the file; "" for files without a digest.
        foreign: The class of the error about a file of another format.
    """

    name: str
    version: int
    what: str
    version_key: str = "format_version"
    digest_key: str = ""
    foreign: type[ClickLogError] = BadInputError

    @property
    def _header(self) -> dict[str, Any]:
        header: dict[str, Any] = {self.version_key: self.version}
        return {"format": self.name, **header} if self.name else header

    def write(self, file: Path, content: dict[str, Any]) -> None:
        """Write a file with JSON-ready content. Raises :class:`OutputError`."""
        value = {**self._header, **content}
        if self.digest_key:
            value[self.digest_key] = self.digest(value)
        write_json(file, value)

    def digest(self, value: dict[str, Any]) -> str:
        """Return the BLAKE2b digest of a file's values, except the digest itself.

        It does not depend on the order of keys or on indentation.
        """
        content = {key: item for key, item in value.items() if key != self.digest_key}
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def read(
        self,
        kind: type[T],
        file: Path,
        remedy: str,
        *,
        other_format: str = "",
        other_version: str = "",
    ) -> T:
        """Read and check a file.

        Args:
            kind: The type of the content, see :func:`base.files.validation.parse`.
            file: The path of the file.
            remedy: What to do about a damaged file.
            other_format: What to do about a file of another format; "" for ``remedy``.
            other_version: What to do about a file of another version; "" for ``remedy``.

        Raises:
            BadInputError: The file is missing or damaged.
            SchemaError: The file has another version.
        """
        value = read_json(file, self.what, remedy)
        if not isinstance(value, dict) or value.get("format", "") != self.name:
            raise self.foreign(f"{file}: not {self.what}", other_format or remedy)
        version = value.get(self.version_key)
        if type(version) is not int or version != self.version:
            what = f"{file}: format version {version}, this program reads {self.version}"
            versions = value.get("versions")
            writer = versions.get("nvt-torchrec") if isinstance(versions, dict) else None
            if writer:
                what += f"; nvt-torchrec {writer} wrote it"
            raise SchemaError(what, other_version or remedy)
        if self.digest_key and value.get(self.digest_key) != self.digest(value):
            raise BadInputError(f"{file}: not what was written (its digest differs)", remedy)
        header = set(self._header)
        if self.digest_key:
            header.add(self.digest_key)
        content = {key: item for key, item in value.items() if key not in header}
        return parse(kind, content, file, remedy)


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """The size of a file, and one of the digests, hexadecimal."""

    bytes: int
    sha256: str | None = None
    blake2b: str | None = None

    def __post_init__(self) -> None:
        if (self.sha256 is None) == (self.blake2b is None):
            raise ValueError("a file has one digest, sha256 or blake2b")

    @classmethod
    def from_file(cls, file: Path, algorithm: str = "sha256") -> FileEntry:
        """Make the entry of a file that exists. Raises OSError."""
        return cls(file.stat().st_size, **{algorithm: _digest(file, algorithm)})

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {key: item for key, item in dataclasses.asdict(self).items() if item is not None}

    def difference(self, file: Path) -> str:
        """Return a message if the digest of a file differs; "" if it does not. Raises OSError."""
        algorithm = "blake2b" if self.sha256 is None else "sha256"
        if _digest(file, algorithm) == getattr(self, algorithm):
            return ""
        return f"{file}: not the file that was written (its {algorithm} digest differs)"


def _digest(file: Path, algorithm: str) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, algorithm).hexdigest()


def holds_only(directory: Path, names: Iterable[str]) -> bool:
    """Return whether the files of a directory, by relative path, are exactly the named ones."""
    held = set()
    for path in directory.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            held.add(str(path.relative_to(directory)))
    return held == {*names}


def check_sizes(directory: Path, files: Mapping[str, FileEntry], remedy: str) -> None:
    """Check that a directory has files, by relative path, with their sizes.

    Raises:
        BadInputError: A file is missing, is outside of the directory, or has another size.
    """
    for name, entry in files.items():
        file = resolve_inside(directory, name, directory, remedy)
        if not os.path.isfile(file):  # False also for a name that is too long
            raise BadInputError(f"{file}: missing", remedy)
        size = file.stat().st_size
        if size != entry.bytes:
            raise BadInputError(f"{file}: {size} bytes instead of {entry.bytes}", remedy)


def check_digests(directory: Path, files: Mapping[str, FileEntry], remedy: str) -> None:
    """Read files, by relative path, and compare their digests.

    Raises:
        BadInputError: A digest differs, or a file cannot be read.
    """

    def compare(name: str) -> None:
        try:
            difference = files[name].difference(directory / name)
        except OSError as error:
            raise BadInputError(f"{directory / name}: cannot be read: {error}", remedy) from error
        if difference:
            raise BadInputError(difference, remedy)

    # threads help, because hashing releases the interpreter lock
    for _ in map_in_order(compare, files, count_cores(), "digests"):
        pass
