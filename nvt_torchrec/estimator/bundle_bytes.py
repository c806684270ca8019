"""Pack a bundle into bytes for the pickle of a fitted estimator, and unpack it."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path


def pack_bundle(bundle: Path) -> bytes:
    """Return the files of a bundle as an uncompressed zip archive."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(bundle.rglob("*")):
            archive.write(file, file.relative_to(bundle))
    return packed.getvalue()


def unpack_bundle(packed: bytes, bundle: Path) -> None:
    """Extract the result of :func:`pack_bundle` to a new directory, and no file outside of it."""
    # A zip archive, because Python 3.11.3 and older cannot confine a tar archive to the directory.
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        archive.extractall(bundle)
