"""Pack a bundle into bytes, which a pickle of a fitted estimator holds, and unpack it."""

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
    """Write the files of :func:`pack_bundle` into a new directory, and none outside of it."""
    # No tar archive: Python 3.11.3 and older cannot keep its files inside of the directory.
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        archive.extractall(bundle)
