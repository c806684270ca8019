"""Scoring files of any size: parse a block, score it, append it to a parquet file."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from clicklog.errors import OutputError
from clicklog.files import atomic_path
from clicklog.raw import stream_rows
from inference.predictor import Predictor

log = logging.getLogger(__name__)


def predict_file(
    predictor: Predictor,
    input_path: str,
    output_path: Path,
    *,
    reject: bool = False,
    block_mb: int = 16,
) -> int:
    """Score a raw log, with or without labels, in bounded memory.

    The output has a row for each row of the input, in its order: ``row`` int64 (the line, from 0),
    ``probability`` float32, and ``label`` uint8 if the input has labels.

    Args:
        predictor: the workflow and the model.
        input_path: tab-separated file, local or remote, also compressed.
        output_path: parquet file; appears when it is whole.
        reject: leave malformed rows out instead of stopping at the first.
        block_mb: MiB of text that are scored at once.

    Returns:
        The number of rows scored.

    Raises:
        BadInputError, BadRowError: the input, naming file, line, column and value.
        OutputError: the output exists, or cannot be written.
    """
    if output_path.exists():
        raise OutputError(f"{output_path} exists", "choose another --output, or remove it first")
    scored = rejected = 0
    writer = None
    bar = tqdm(desc="predict", unit="rows", unit_scale=True, disable=None)
    with atomic_path(output_path) as temporary, bar:
        try:
            for lines, rows in stream_rows(
                input_path, predictor.spec, block_bytes=block_mb << 20, reject=reject
            ):
                table = {"row": lines, "probability": predictor.predict_rows(rows)}
                if rows.label is not None:
                    table["label"] = rows.label
                block = pa.table(table)
                writer = writer or pq.ParquetWriter(
                    temporary, block.schema, write_page_checksum=True
                )
                writer.write_table(block)
                scored += len(rows)
                rejected += rows.bad_count
                bar.update(len(rows))
        finally:
            if writer:
                writer.close()
    if rejected:
        log.warning("%s: %d malformed rows left out", input_path, rejected)
    return scored
