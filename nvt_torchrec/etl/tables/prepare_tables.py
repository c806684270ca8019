"""Store the tables of a run or an extension, and check that the log has their keys."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.etl.state.output import TABLES
from nvt_torchrec.etl.tables.table_sources import TableSources
from nvt_torchrec.etl.tables.table_writer import REJECTED_FILE, store_table
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import UNLIMITED
from nvt_torchrec.formats.table_files import DIRECTORY, link_table
from nvt_torchrec.formats.vectors import IN_WORKFLOW, link_vectors
from nvt_torchrec.workflows.stored_table import StoredTable
from nvt_torchrec.workflows.stored_tables import StoredTables

#: The minimum share of rows whose keys a table must have.
_MIN_FOUND = 0.01
#: Bytes of a block that are read to check this.
_SAMPLE_BYTES = 1 << 20


def store_tables(
    spec: FeatureSpec,
    sources: TableSources,
    work: Path,
    *,
    before: Path | None = None,
    threads: int = 1,
    reject: bool = False,
    report: Callable[[float], object] = lambda rows: None,
) -> None:
    """Store all tables of a spec in the state of a run, except tables that were stored before.

    Args:
        spec: The columns.
        sources: The files of the tables. For an extension, a table without files does not change.
        work: The directory of the state.
        before: For an extension, the workflow that is extended. Rows of its tables whose keys are
            not in the files are kept.
        threads: Number of pieces of a file that are parsed at once.
        reject: Whether malformed rows are left out.
        report: Called with the number of rows read since the last call.

    Raises:
        BadRowError, BadInputError, OutputError: See :func:`.table_writer.store_table`.
    """
    for rule in spec.joined_tables:
        directory = work / TABLES / rule.name
        if directory.exists():
            continue
        earlier = before / DIRECTORY / rule.name if before else None
        files = sources.get(rule.name, [])
        if not files:
            assert earlier is not None
            with new_directory(directory) as temporary:
                link_table(spec, rule.name, earlier, temporary)
                for vector in spec.table_vectors(rule.name):
                    assert before is not None
                    link_vectors(before / IN_WORKFLOW, temporary / IN_WORKFLOW, vector.name)
            continue
        store_table(
            rule,
            spec,
            files,
            directory,
            earlier=StoredTable(earlier, spec, rule.name) if earlier else None,
            earlier_vectors=before / IN_WORKFLOW if before else None,
            threads=threads,
            reject=reject,
            report=report,
        )


@functools.lru_cache(1)
def open_stored(work: Path, spec: FeatureSpec) -> StoredTables | None:
    """Open the tables in the state of a run; None for a spec without tables."""
    return StoredTables(work / TABLES, spec) if spec.joined_tables else None


def check_keys(spec: FeatureSpec, work: Path, blocks: list[Block]) -> None:
    """Check, by the first rows of the given blocks, that each table has keys of the log.

    Raises:
        SettingsError: A table has hardly any: the spec names the wrong column, or the log and the
            table write keys differently.
    """
    tables = open_stored(work, spec)
    if tables is None:
        return
    found = np.zeros(len(spec.joined_tables), np.int64)
    num_rows = 0
    for block in blocks:
        pieces = read_block_chunks(block, spec, max_bad_rows=UNLIMITED, chunk_bytes=_SAMPLE_BYTES)
        rows = next(pieces)
        assert rows.table_keys is not None
        num_rows += len(rows)
        for j, rule in enumerate(spec.joined_tables):
            found[j] += np.count_nonzero(tables.by_name[rule.name].find(rows.table_keys[j]) >= 0)
    for rule, count in zip(spec.joined_tables, found.tolist(), strict=True):
        if count < _MIN_FOUND * num_rows:
            kinds = ", ".join(f"{name} as {spec.make_key_read(name).raw}" for name in rule.key)
            raise SettingsError(
                f"table {rule.name}: it has the keys of {count:,} of {num_rows:,} rows of the log",
                f"correct the key of the table in the spec; log and table are read alike: {kinds}",
            )


def keep_rejected(spec: FeatureSpec, work: Path, directory: Path) -> None:
    """Copy the rejected rows of tables to the directory of all rejected rows."""
    for rule in spec.joined_tables:
        file = work / TABLES / rule.name / REJECTED_FILE
        copy_rejected(file, directory / f"{rule.role}.{rule.name}.tsv")


def copy_rejected(file: Path, target: Path) -> None:
    """Copy rejected rows, with a header; do nothing if the file is missing or empty."""
    with contextlib.suppress(FileNotFoundError):
        content = file.read_bytes()
        if content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(b"file\tline\treason\traw\n" + content)
