"""Durable parts of a bulk run, beside its output, until they become one file.

``.OUTPUT.parts/`` holds the plan of a journal (:mod:`base.files.journal`), ``N.parquet`` (part N)
and ``N.tsv`` (its rejected rows). However a run ends, the next one goes on behind its last part.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.files.atomic import TEMPORARY, atomic_path, locked, output_errors, together
from nvt_torchrec.base.files.journal import Journal, refuse_changes

log = logging.getLogger(__name__)

_ROW_GROUP_ROWS = 1 << 20


@contextlib.contextmanager
def open_parts(output: Path, settings: dict[str, Any], *, resume: bool) -> Iterator[Parts]:
    """The parts of one output. Meanwhile no other run may write there.

    Args:
        output: The file that the parts become.
        settings: What the scores depend on.
        resume: Keep the parts of an earlier run, which must have had the same settings.

    Raises:
        OutputError: The earlier run had others, another run writes there, or it cannot be written.
    """
    parts = Parts(output)
    with contextlib.ExitStack() as stack:
        with output_errors(output):
            parts.directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(parts.directory / "lock", parts.directory))
        parts.begin({"settings": json.loads(json.dumps(settings))}, resume)  # tuples become lists
        try:
            yield parts
        finally:
            if parts.done:
                log.warning(
                    "%s: %d finished parts are kept, --resume uses them", output, parts.done
                )
            else:
                shutil.rmtree(parts.directory, ignore_errors=True)


class Parts:
    """See :func:`open_parts`."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.directory = output.with_name(f".{output.name}.parts")
        self._journal = Journal(self.directory)
        #: Rows of each finished part, and its rejected rows.
        self._counts: list[tuple[int, int]] = []

    def begin(self, plan: dict[str, Any], resume: bool) -> None:
        """Find the finished parts of an earlier run with this plan, or discard them."""
        remedy = "call it as before, or without --resume to begin anew"
        before = self._journal.plan(dict[str, Any], remedy) if resume else None
        if before is None:
            with output_errors(self.output):
                for file in self.directory.iterdir():  # of an earlier run, before its plan is gone
                    if file.suffix in (".parquet", ".tsv", TEMPORARY):
                        file.unlink(missing_ok=True)
            self._journal.begin(plan)
            return
        refuse_changes(before, plan, self.output, remedy)
        while self._part(self.done).exists() and self._rejected(self.done).exists():
            rejected = self._rejected(self.done).read_bytes().count(b"\n")
            self._counts.append((pq.read_metadata(self._part(self.done)).num_rows, rejected))

    @property
    def done(self) -> int:
        """How many parts are finished."""
        return len(self._counts)

    @property
    def rows(self) -> int:
        """Rows in the parts so far."""
        return sum(rows for rows, _ in self._counts)

    def _part(self, number: int) -> Path:
        return self.directory / f"{number}.parquet"

    def _rejected(self, number: int) -> Path:
        return self.directory / f"{number}.tsv"

    def add(self, tables: Sequence[pa.Table], rejected: bytes) -> None:
        """Make the next part durable: its rows, and lines about its rejected rows."""
        table = pa.concat_tables(tables)
        with together():
            with atomic_path(self._rejected(self.done)) as temporary:
                temporary.write_bytes(rejected)
            with atomic_path(self._part(self.done)) as temporary:
                pq.write_table(
                    table, temporary, row_group_size=_ROW_GROUP_ROWS, write_page_checksum=True
                )
        self._counts.append((len(table), rejected.count(b"\n")))

    def finish(self, rejected_file: Path) -> tuple[int, int]:
        """Join the parts into the output, and their rejected rows into another file if any.

        Returns:
            How many rows, and how many rejected ones.
        """
        rows, bad = self.rows, sum(rejected for _, rejected in self._counts)
        if bad:
            with atomic_path(rejected_file) as temporary, open(temporary, "wb") as out:
                out.write(b"line\treason\traw\n")
                for number in range(self.done):
                    out.write(self._rejected(number).read_bytes())
        with atomic_path(self.output) as temporary:
            with pq.ParquetFile(self._part(0)) as first:
                schema = first.schema_arrow
            with pq.ParquetWriter(temporary, schema, write_page_checksum=True) as writer:
                for table in self._groups():
                    writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
        self._counts = []  # they are in the output: not worth keeping
        return rows, bad

    def _groups(self) -> Iterator[pa.Table]:
        for number in range(self.done):
            with pq.ParquetFile(self._part(number)) as part:
                for index in range(part.num_row_groups):
                    yield part.read_row_group(index)
