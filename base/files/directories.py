"""Directories that are whole or absent: write beside, fsync, rename."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.base.files.atomic import TEMPORARY, fsync_directory, output_errors


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``path``; on success sync its files and rename it.

    Raises:
        OutputError: ``path`` exists, or cannot be written; nothing is left of it.
    """
    path = path.absolute()
    if path.exists():
        raise OutputError(f"{path} exists", "choose another path, or remove it first")
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with output_errors(path, "free space, or choose a writable place"):
            shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
            temporary.mkdir(parents=True)
            yield temporary
            for found in (temporary, *temporary.rglob("*")):
                if found.is_dir():
                    fsync_directory(found)
                else:
                    with open(found, "rb") as opened:  # may be a link to a read-only file
                        os.fsync(opened.fileno())
            os.rename(temporary, path)
            fsync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
