"""Sample the training parquet, and count ids from its footers, for the report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.validation import open_regular
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.splits import SPLITS


def read_sample(
    output: EtlOutput, manifest: Manifest, names: Sequence[str], *, row_groups: int, rows: int
) -> pa.Table:
    """Read a deterministic sample of training rows.

    Args:
        output: The output.
        manifest: The manifest of the output.
        names: The columns to read.
        row_groups: Maximum number of row groups; they are the first ones of evenly spaced parts.
        rows: Maximum number of rows from each row group, evenly spaced.

    Raises:
        BadInputError: A part is damaged.
    """
    parts = [part.file for part in manifest.files if part.rows and part.split == "train"]
    if not parts:  # no rows are for training
        parts = [part.file for part in manifest.files if part.rows]
    num_samples = min(row_groups, len(parts)) if names else 0
    samples = [pa.table({})]
    for i in range(num_samples):
        file = output.splits / parts[i * len(parts) // num_samples]
        try:
            with open_regular(file) as opened:
                parquet = pq.ParquetFile(opened, page_checksum_verification=True)
                group = parquet.read_row_group(0, columns=list(names), use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise BadInputError(
                f"{file}: cannot be read: {error}", "copy the output again, or run the ETL again"
            ) from error
        step = -(-group.num_rows // rows)
        samples.append(group.take(to_arrow(np.arange(0, group.num_rows, step))))
    return pa.concat_tables(samples[1:] or samples)


def to_values(column: pa.ChunkedArray) -> np.ndarray:
    """Return the values of a column of a sample; for lists, their elements."""
    array = column.combine_chunks()
    return to_numpy(array.flatten() if pa.types.is_list(array.type) else array)


def to_ids_and_rows(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ids of a column of a sample.

    Returns:
        The ids and, for lists, the row of each id, else None. An empty list has the id 0.
    """
    ids = to_values(column)
    if not pa.types.is_list(column.type):
        return ids, None
    rows = np.arange(len(column))
    lengths = to_numpy(pc.list_value_length(column).combine_chunks())
    empty_rows = rows[lengths == 0]
    ids = np.append(ids, np.zeros(len(empty_rows), ids.dtype))
    return ids, np.append(rows.repeat(lengths), empty_rows)


def count_ids(
    output: EtlOutput, manifest: Manifest, names: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Count the ids of list columns in each split.

    Args:
        output: The output.
        manifest: The manifest of the output.
        names: The list columns.

    Returns:
        By column, by split, the number of ids.
    """
    if not names:  # do not read the footers
        return {}
    totals: dict[str, dict[str, int]] = {}
    for name in names:
        # Footers count an empty list as a value.
        totals[name] = {split: -manifest.splits[split]["missing"][name] for split in SPLITS}
    for part in manifest.files:
        footer = pq.read_metadata(output.splits / part.file)
        for i in range(footer.num_row_groups):
            group = footer.row_group(i)
            for j in range(group.num_columns):
                chunk = group.column(j)
                name = chunk.path_in_schema.split(".")[0]
                if name in totals:
                    totals[name][part.split] += chunk.num_values
    return totals
