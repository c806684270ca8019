"""Writing the parquet that the trainer reads, the same for all engines.

Row groups have 128 Ki rows. Columns of few values are indices of a dictionary, others plain;
nothing is compressed. The files are larger than with Snappy and dictionaries everywhere, but they
are written and decoded faster: Snappy saves little on indices, which are packed bits, and makes
plain pages slow to decode. Page checksums turn a flipped bit into an error instead of a wrong id.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.files.atomic import atomic_path, together, write_json, write_text
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS

ROW_GROUP_ROWS = 128 << 10
#: Column chunks whose dictionary becomes larger (4096 values of four bytes) are written plain.
DICTIONARY_BYTES = 16 << 10


def write_part(table: pa.Table, path: Path) -> int:
    """Write one part, durably; bytes written. Raises :class:`base.errors.OutputError`."""
    return write_tables([table], path)


def write_tables(tables: Iterable[pa.Table], path: Path) -> int:
    """Write one part from tables of one schema, however long each is; bytes written.

    Row groups have :data:`ROW_GROUP_ROWS` rows, the last one fewer; memory holds no more rows than
    that.

    Args:
        tables: at least one; if making one raises, no part is left.
        path: of the part.

    Raises:
        OutputError: the part cannot be written.
    """
    tables = iter(tables)
    first = next(tables)
    with atomic_path(path) as temporary:
        with pq.ParquetWriter(
            temporary,
            first.schema,
            compression="none",
            use_dictionary=True,
            dictionary_pagesize_limit=DICTIONARY_BYTES,
            write_page_checksum=True,
        ) as writer:
            for group in _row_groups(itertools.chain([first], tables)):
                writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
                del group  # so that it is not in memory while the next one is made
        return temporary.stat().st_size


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of ``ROW_GROUP_ROWS`` rows; an empty table if there are none."""
    waiting: list[pa.Table] = []
    rows = groups = 0
    for table in tables:
        waiting.append(table)
        rows += len(table)
        while rows >= ROW_GROUP_ROWS:
            joined = pa.concat_tables(waiting)
            ready, waiting = [joined.slice(0, ROW_GROUP_ROWS)], [joined.slice(ROW_GROUP_ROWS)]
            del joined
            yield ready.pop()
            groups += 1
            rows -= ROW_GROUP_ROWS
    if rows or not groups:
        yield pa.concat_tables(waiting)


def write_descriptions(
    split_root: Path, files: list[str], schema: TableSchema, *, listed_in: Path | None = None
) -> None:
    """Write what describes the parts: ``_metadata``, schemas, and HugeCTR's two files.

    Args:
        split_root: the directory of train, valid and test.
        files: all parts, relative to it, in order.
        schema: columns and table sizes.
        listed_in: the directory that the splits will be in, for HugeCTR's absolute paths; None: in
            ``split_root``.
    """
    with together():
        _write_metadata(split_root, files, schema)
        schema.write(split_root)
        for split in SPLITS:
            names = [Path(file).name for file in files if file.startswith(f"{split}/")]
            directory = split_root / split
            rows = _write_metadata(directory, names, schema)
            schema.write(directory)
            _write_hugectr(directory, (listed_in or split_root) / split, names, rows, schema)


def _write_metadata(directory: Path, files: list[str], schema: TableSchema) -> list[int]:
    """Write ``_metadata``; the rows of each file. Holds one footer beside what it writes."""
    rows = []
    with atomic_path(directory / "_metadata") as temporary:
        pq.write_metadata(schema.arrow, temporary)
        metadata = pq.read_metadata(temporary)
        for file in files:
            footer = pq.read_metadata(directory / file)
            footer.set_file_path(file)
            metadata.append_row_groups(footer)
            rows.append(footer.num_rows)
        metadata.write_metadata_file(temporary)
    return rows


def _write_hugectr(
    directory: Path, listed_in: Path, names: list[str], rows: list[int], schema: TableSchema
) -> None:
    """``_file_list.txt`` and ``_metadata.json`` as HugeCTR's parquet reader wants them."""
    paths = [str(listed_in.resolve() / name) for name in names]
    write_text(directory / "_file_list.txt", "\n".join([str(len(paths)), *paths]) + "\n")
    index = {name: i for i, name in enumerate(schema.columns)}

    def described(columns: Iterable[str]) -> list[dict[str, Any]]:
        return [{"col_name": name, "index": index[name]} for name in columns]

    parts = zip(names, rows, strict=True)
    content = {
        "file_stats": [{"file_name": name, "num_rows": count} for name, count in parts],
        "labels": described(schema.labels),
        "conts": described(schema.dense),
        "cats": described(schema.categorical),
    }
    write_json(directory / "_metadata.json", content)
