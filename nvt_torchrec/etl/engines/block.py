"""What is done with a block of a log on the host: count it, or encode it.

A block is read in pieces that fit the processor's caches. Every heavy step (reading, parsing,
sorting, encoding, writing parquet) releases the interpreter lock.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nvt_torchrec.base.files.atomic import Written
from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.etl.division.plan import Unit
from nvt_torchrec.etl.engines.counting import Counts, count, merge
from nvt_torchrec.etl.engines.moments import moments
from nvt_torchrec.etl.engines.runs import SortedRun
from nvt_torchrec.etl.units.results import UnitResult, count_missing
from nvt_torchrec.etl.units.row_split import divide_rows
from nvt_torchrec.etl.units.writing import Encoded, write_units
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.rows import CategoryValues, Jagged, RawRows
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.moments import merge_moments, normalized

if TYPE_CHECKING:
    from nvt_torchrec.workflows.compiled import CompiledWorkflow

#: Text that is parsed at once. Small enough that it stays in a core's caches together with the
#: parsed columns, and that freed memory is reused instead of returned to the system. The last bits
#: of the moments depend on it.
PIECE_BYTES = 2 << 20


def count_block(block: Block, spec: FeatureSpec, reject: bool | int) -> SortedRun:
    """Count the categories of a block, and compute the moments of its dense columns.

    Of a divided block, only the rows for training are counted.

    Args:
        block: The block.
        spec: The columns.
        reject: Whether to leave malformed rows out instead of raising.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: The block cannot be read.
    """
    columns: list[list[CategoryValues]] = [[] for _ in spec.categorical]
    missing = np.zeros(len(columns), np.int64)
    of_pieces = [np.zeros((len(spec.dense), 4))]
    rows_read = 0
    pieces = read_block_chunks(block, spec, reject=reject, chunk_bytes=PIECE_BYTES)
    for (rows,) in divide_rows(pieces, block, ["train"]):
        rows_read += len(rows)
        missing += count_missing(rows.categorical_missing, len(columns))
        for of_column, piece in zip(columns, rows.categorical, strict=True):
            of_column.append(piece)
        if normalized(spec):
            of_pieces.append(moments(rows, spec))
    counts: dict[str, Counts] = {}
    nulls: dict[str, int] = {}
    for column, of_column, absent in zip(spec.categorical, columns, missing, strict=True):
        name = column.vocabulary_name
        counted = _count_column(of_column, column, int(absent))
        counts[name] = merge([counts[name], counted]) if name in counts else counted
        nulls[name] = nulls.get(name, 0) + (0 if column.multi_hot else int(absent))
    return SortedRun(
        rows=rows_read,
        nulls=np.array([nulls[name] for name in spec.vocabularies], np.int64),
        moments=merge_moments(of_pieces)[np.newaxis],
        counts=[counts[name] for name in spec.vocabularies],
    )


def _count_column(pieces: list[CategoryValues], column: CategoricalColumn, missing: int) -> Counts:
    values = [piece.values if isinstance(piece, Jagged) else piece for piece in pieces]
    if column.hash_buckets:  # the id is a hash, there is nothing to count
        return count([values[0][:0]])
    return count(values, placeholders=0 if column.multi_hot else missing)


def encode_block(
    units: tuple[Unit, ...], workflow: CompiledWorkflow, work: Path, *, reject: bool | int
) -> tuple[list[UnitResult], list[Written]]:
    """Read the units of a block, encode them and write their parts.

    Takes, returns and raises what :func:`etl.units.writing.write_units` does.
    """
    block = units[0].block
    pieces = read_block_chunks(block, workflow.spec, reject=reject, chunk_bytes=PIECE_BYTES)
    return write_units(units, pieces, functools.partial(_encode_rows, workflow), work)


def _encode_rows(workflow: CompiledWorkflow, rows: RawRows) -> Encoded:
    encoded = workflow.transform(rows)
    return compiled.to_table(encoded, workflow.schema), encoded.oov
