"""The parsed rows of a block of a raw click log, whatever the format of its file."""

from __future__ import annotations

from collections.abc import Iterator

from nvt_torchrec.base.errors import BadRowError
from nvt_torchrec.clicklog.readers.log_format import Block, format_of
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows, describes


def check_label(label: bool, source: str, spec: FeatureSpec) -> None:
    """Raise :class:`BadRowError` for a file whose rows have no label."""
    if label:
        return
    wanted = [name for name in spec.sources(label=True) if name not in spec.sources(label=False)]
    remedy = "correct the names in the spec, or pass data with labels to train on"
    if any(f"/{name}=" in source for name in wanted):
        remedy = "convert it to parquet: of text, values in the names of directories are no columns"
    raise BadRowError(f"{source}: rows without {', '.join(wanted)}, which training reads", remedy)


def read_block(
    block: Block, spec: FeatureSpec, *, label: bool = True, reject: bool | int = False
) -> RawRows:
    """Read and parse a block.

    Args:
        block: The rows.
        spec: The columns, and the format of the file.
        label: Whether rows have the label.
        reject: Leave bad rows out (all are in ``RawRows.bad``) instead of raising an error.

    Raises:
        BadInputError: The file is missing or damaged, or lacks a column.
        BadRowError: A row breaks the spec; names file, line, column and value.
    """
    (rows,) = read_block_chunks(block, spec, label=label, reject=reject, chunk_bytes=None)
    return rows


def read_block_chunks(
    block: Block,
    spec: FeatureSpec,
    *,
    label: bool = True,
    reject: bool | int = False,
    chunk_bytes: int | None = 8 << 20,
) -> Iterator[RawRows]:
    """:func:`read_block` in chunks of about ``chunk_bytes``, which bounds its memory.

    Line numbers count from 0 in each chunk; ``RawRows.lines`` adds up to the block's. Small chunks
    also stay in a processor's cache. ``None``: one chunk. ``reject`` may also be the number of bad
    rows that are left out at most; more are an error.
    """
    reader = format_of(spec)
    lines_before = bad = 0
    for rows in reader.read(block, label=label, reject=reject, chunk_bytes=chunk_bytes):
        bad += rows.bad_count
        if rows.bad_count and (not reject or not describes(reject, bad)):
            first = reader.first_line(block) + lines_before
            error = bad_row_error(rows, block.source, first, reader.unit)
            if reject:  # the rest of the log cannot matter
                raise BadRowError(
                    f"{error.what}\n{bad:,} rows of this block are malformed, which is more than "
                    "--max_bad_fraction allows of the whole input",
                    "correct the file or the spec, or allow more with --max_bad_fraction",
                )
            raise error
        lines_before += rows.lines
        yield rows


def bad_row_error(rows: RawRows, source: str, first: int, unit: str = "line") -> BadRowError:
    """Return the error of the first bad row.

    Args:
        rows: With at least one bad row.
        source: Names the file.
        first: The number of their first line in the file.
        unit: What is numbered, "line" or "row".
    """
    bad = rows.bad[0]
    more = f" (and {rows.bad_count - 1} more rows near it)" if rows.bad_count > 1 else ""
    return BadRowError(
        f"{source}, {unit} {first + bad.line}: {bad.what}{more}",
        f"{bad.remedy or 'correct the file'}, or leave such rows out with --on_bad_rows quarantine",
    )
