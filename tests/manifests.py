"""Manifests of outputs that no run made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from nvt_torchrec.formats.manifest import InputFile, Manifest, PartFile

ROWS = {"in": 1, "out": 1, "rejected": 0}
COUNTS = {"rows": 1, "positives": 0, "missing": {}, "out_of_vocabulary": {}}
#: The manifest of one raw file of one row.
PLAIN = Manifest(
    settings={},
    inputs=[InputFile(0, "day_0", {"size": 1}, ROWS, "0")],
    rows=ROWS,
    days={"train": [0], "valid": [], "test": []},
    splits={"train": COUNTS},
    by_day_and_split={},
    by_day={},
    num_embeddings_per_feature="3",
    workflow_digest="0" * 64,
    versions={},
    files=[PartFile("train/part.0.parquet", 1, 9, 0, 0, "")],
    next_parts={"train": 1, "valid": 0, "test": 0},
    generation=0,
)


def write_manifest(path: Path, **values: Any) -> None:
    """Write a manifest with these values, the others those of :data:`PLAIN` and `COUNTS`."""
    splits = values.get("splits", {})
    counts = {name: COUNTS | given for name, given in splits.items() if isinstance(given, dict)}
    manifest = dataclasses.replace(PLAIN, **values | ({"splits": counts} if counts else {}))
    manifest.write(path)
