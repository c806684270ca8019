"""Small splits with several labels and a weight for each row."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.formats.schema import TableSchema
from tests.nvt_loader.data import WRITER, without_nulls, write_metadata, write_split


def write_weighted(root: Path, files: dict[str, list[int]], **options) -> TableSchema:
    """A split of the contract with the further labels ``liked``, ``bought`` and the weight ``w``.

    Beside it, in ``plain``, the same rows without them.
    """
    plain = write_split(root / "plain", files, **options)
    schema = dataclasses.replace(plain, labels=("label", "liked", "bought"), weight="w")
    for path in sorted((root / "plain").glob("*/part.*.parquet")):
        table = pq.read_table(path)
        rng = np.random.default_rng([len(table), int(path.name.split(".")[1])])
        columns = dict(zip(table.column_names, table.columns, strict=True))
        for name in schema.labels[1:]:
            columns[name] = pa.array(rng.integers(0, 2, len(table)).astype(np.float32))
        columns["w"] = pa.array(rng.choice([0.0, 0.25, 1.0, 3.5], len(table)).astype(np.float32))
        order = [*schema.columns, *(name for name in columns if name.endswith("_weight"))]
        target = root / path.parent.name / path.name
        target.parent.mkdir(exist_ok=True)
        rows = pq.ParquetFile(path).metadata.row_group(0).num_rows if len(table) else 1
        table = without_nulls({name: columns[name] for name in order})
        pq.write_table(table, target, rows, **WRITER)
        schema.write(target.parent)
    schema.write(root)
    write_metadata(root)
    return schema
