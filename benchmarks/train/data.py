"""The data of the training benchmark: the same rows as the ETL's parquet and as dlrm_main's arrays.

dlrm_main reads ``train_{dense,sparse,labels}.npy`` (``--dataset_name criteo_kaggle``): arrays by
row, as TorchRec's scripts write them.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.loader.data import DENSE, ROW_GROUP_ROWS, TABLE_SIZES, WRITER, make_rows
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS

log = logging.getLogger("benchmarks")

#: Rows of valid and test; evaluations are not measured.
_HELD_OUT_ROWS = 20_000


def ensure(root: Path, rows: int) -> None:
    """Make ``root/split/{train,valid,test}`` and ``root/npy``, unless they exist."""
    done = root / "done"
    if done.is_file() and done.read_text() == f"{rows} 1":
        return
    shutil.rmtree(root, ignore_errors=True)
    log.info("making %d rows in %s", rows, root)
    schema = TableSchema(
        "label",
        tuple(f"int_{i}" for i in range(DENSE)),
        tuple(f"cat_{i}" for i in range(len(TABLE_SIZES))),
        TABLE_SIZES,
    )
    (root / "split").mkdir(parents=True)
    schema.write(root / "split")
    for seed, split in enumerate(SPLITS):
        table = make_rows(schema, rows if split == "train" else _HELD_OUT_ROWS, seed, np.int32)
        directory = root / "split" / split
        directory.mkdir()
        schema.write(directory)
        pq.write_table(table, directory / "part.0.parquet", row_group_size=ROW_GROUP_ROWS, **WRITER)
        if split == "train":
            _to_npy(table, schema, root / "npy")
    done.write_text(f"{rows} 1")


def _to_npy(table: pa.Table, schema: TableSchema, target: Path) -> None:
    target.mkdir()

    def save(kind: str, names: tuple[str, ...], dtype: type) -> None:
        columns = [np.asarray(table[name]).astype(dtype) for name in names]
        np.save(target / f"train_{kind}.npy", np.stack(columns, axis=1))

    save("dense", schema.dense, np.float32)
    save("sparse", schema.categorical, np.int32)
    save("labels", (schema.label,), np.int32)
