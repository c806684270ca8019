"""A bundle as bytes: what a pickle of a fitted estimator holds."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path


def pack_bundle(bundle: Path) -> bytes:
    """Return the files of a bundle as an uncompressed tar archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(bundle, arcname=".")
    return packed.getvalue()


def unpack_bundle(packed: bytes, bundle: Path) -> None:
    """Write the files of :func:`pack_bundle` into a new directory."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(bundle, filter="data")
