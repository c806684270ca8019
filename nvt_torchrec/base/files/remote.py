"""Files that may be remote: any path or URL that fsspec opens."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.validation import open_regular


@functools.lru_cache(maxsize=64)
def find_filesystem(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a path or URL, and the path in it. Raises BadInputError."""
    try:
        filesystem, root = fsspec.core.url_to_fs(path)
        if isinstance(filesystem, LocalFileSystem):
            root = os.path.abspath(root)  # without "..", so that a file has only one path
        return filesystem, root
    except (ImportError, ValueError) as error:
        raise BadInputError(
            f"{path}: cannot be opened: {error}",
            "install the package that fsspec needs for it, or fetch the files and pass their path",
        ) from error


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file that fsspec opens, with the methods of a Path that reading needs."""

    filesystem: Any
    path: str

    def __str__(self) -> str:
        return str(self.filesystem.unstrip_protocol(self.path))

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name

    def stat(self) -> SimpleNamespace:
        """Return the size, and a key that changes when the file is rewritten. Raises OSError."""
        key = self.filesystem.ukey(self.path)
        return SimpleNamespace(st_size=self.filesystem.size(self.path), key=key)


def open_input(path: str) -> IO[bytes]:
    """Open a path or URL for reading.

    Raises:
        BadInputError: Its file system is not known.
        OSError: The file cannot be opened, or is local and not a regular one.
    """
    filesystem, name = find_filesystem(path)
    is_local = isinstance(filesystem, LocalFileSystem)
    return open_regular(name) if is_local else filesystem.open(name, "rb")


def open_file(path: Path | str | RemoteFile) -> IO[bytes]:
    """Open a file for reading. Raises OSError, also for a local file that is not regular."""
    if isinstance(path, RemoteFile):
        return path.filesystem.open(path.path, "rb")
    return open_regular(path)
