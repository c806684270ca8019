"""Request bodies made of raw rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nvt_torchrec.base.errors import SettingsError


def bodies(bundle: Path, path: str, sizes: Sequence[int]) -> dict[int, bytes]:
    """Return bodies for ``POST /predict`` by their number of rows.

    Args:
        bundle: The bundle to which the rows belong.
        path: Raw rows in the training log's format; they are repeated if they are too few.
        sizes: The numbers of rows.

    Raises:
        SettingsError: There is no well-formed row.
    """
    from nvt_torchrec.clicklog.readers.stream import stream_unparsed
    from nvt_torchrec.inference.inputs.samples import rows_as_dicts
    from nvt_torchrec.workflows import compiled

    spec = compiled.load(bundle / "workflow").spec
    rows: list[dict] = []
    for piece in stream_unparsed(path, spec, block_bytes=1 << 20):
        rows += rows_as_dicts(piece, max(sizes) - len(rows))
        if len(rows) >= max(sizes):
            break
    if not rows:
        raise SettingsError(f"{path}: no well-formed row", "there is nothing to send")
    rows *= -(-max(sizes) // len(rows))
    return {size: json.dumps({"rows": rows[:size]}).encode() for size in sizes}
