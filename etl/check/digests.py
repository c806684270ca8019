"""Check the digests of parts that a GPU wrote, in place of the page checksums of all others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.etl.check.files import AGAIN, Output
from nvt_torchrec.formats.manifest import PartFile


def check(output: Output, *, workers: int) -> None:
    """Compare the digests of files with those in the manifest, where it has any."""
    files = output.manifest.files if output.manifest else []
    parts = [part for part in files if part.sha256 and part.file in output.footers]

    def difference(part: PartFile) -> str:
        entry = FileEntry(part.bytes, sha256=part.sha256)
        try:
            return entry.difference(output.root / part.file)
        except OSError as error:
            return f"cannot be read: {error}"

    with ThreadPoolExecutor(workers, "check") as pool:
        for part, found in zip(parts, pool.map(difference, parts), strict=True):
            if found:
                output.error("digest", part.file, found, AGAIN)
