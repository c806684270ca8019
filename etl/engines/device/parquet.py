"""Writing parts from a card, by libcudf's writer: the files of :mod:`etl.parquet`, nearly.

They have the same columns, row groups, statistics and encodings, and no compression. libcudf writes
no page checksums; a digest of the whole file takes their place, which the manifest records and
``python -m etl check`` compares.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nvt_torchrec.base.device import Device, DeviceArray
from nvt_torchrec.etl.parquet import DICTIONARY_BYTES, ROW_GROUP_ROWS
from nvt_torchrec.formats.schema import TableSchema


def write_on_device(
    device: Device,
    label: DeviceArray,
    dense: DeviceArray,
    ids: DeviceArray,
    schema: TableSchema,
    path: Path,
) -> None:
    """Write rows as one file, encoded on the card; not durably.

    Args:
        device: the card.
        label: [n], at least one row.
        dense: float32 [dense columns, n].
        ids: int32 [categorical columns, n].
        schema: the columns.
        path: of the file.

    Raises:
        OSError: the file cannot be written.
    """
    from pylibcudf import Column, Table
    from pylibcudf.io.parquet import ChunkedParquetWriter, ChunkedParquetWriterOptions
    from pylibcudf.io.types import (
        CompressionType,
        DictionaryPolicy,
        SinkInfo,
        StatisticsFreq,
        TableInputMetadata,
    )

    stream = device.libcudf_stream()
    columns = [label.astype(np.float32), *dense, *ids]

    def rows(begin: int) -> Table:
        parts = [column[begin : begin + ROW_GROUP_ROWS] for column in columns]
        return Table([Column.from_cuda_array_interface(part, stream) for part in parts])

    first = rows(0)
    metadata = TableInputMetadata(first)
    for described, name in zip(metadata.column_metadata, schema.columns, strict=True):
        described.set_name(name).set_nullability(False)
    options = (
        ChunkedParquetWriterOptions.builder(SinkInfo([str(path)]))
        .metadata(metadata)
        .compression(CompressionType.NONE)
        .stats_level(StatisticsFreq.STATISTICS_ROWGROUP)
        .row_group_size_rows(ROW_GROUP_ROWS)
        .max_dictionary_size(DICTIONARY_BYTES)
        .build()
    )
    options.set_dictionary_policy(DictionaryPolicy.ADAPTIVE)
    try:
        # a call for each row group: libcudf would end one at a multiple of 5000 rows
        writer = ChunkedParquetWriter.from_options(options, stream)
        for begin in range(0, len(label), ROW_GROUP_ROWS):
            writer.write(rows(begin) if begin else first)
        writer.close([])
    except RuntimeError as error:  # libcudf's, for whatever went wrong
        if "CUDA error" in str(error) or "cudaError" in str(error):
            raise
        raise OSError(str(error)) from error
    device.synchronize()
