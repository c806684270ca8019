"""Durable parts of a bulk run, beside its output, until they become one file.

``.OUTPUT.parts/`` holds ``run.json`` (what the scores depend on), ``N.parquet`` (part N) and
``N.tsv`` (its rejected rows). Each appears when it is whole, the parquet last; a run that was ended
by whatever begins again behind the last part.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.errors import OutputError
from clicklog.files.atomic import atomic_path, lock, read_json, write_json
from clicklog.files.validation import parse

log = logging.getLogger(__name__)

_ROW_GROUP_ROWS = 1 << 20


class Parts:
    """The parts of one output. A context: while it is open, no other run may write there."""

    def __init__(self, output: Path, key: dict[str, Any], *, resume: bool) -> None:
        self.output = output
        self.directory = output.with_name(f".{output.name}.parts")
        self._key = json.loads(json.dumps(key))  # tuples are lists in there
        self._resume = resume
        self.done = 0

    def __enter__(self) -> Parts:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.directory / "lock", "ab")
        except OSError as error:
            raise OutputError(
                f"{self.output}: cannot be written: {error.strerror}", "choose a writable place"
            ) from error
        try:
            lock(self._lock, self.directory)
            self._open()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()
        if self.done:
            log.warning(
                "%s: %d finished parts are kept, --resume uses them", self.output, self.done
            )
        else:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _open(self) -> None:
        marker = self.directory / "run.json"
        if self._resume and marker.exists():
            before = read_json(marker, "an unfinished `python -m inference predict`")
            before = parse(dict[str, Any], before, marker, "call it without --resume")
            changed = [key for key in self._key if before.get(key) != self._key[key]]
            if changed:
                raise OutputError(
                    f"{self.output}: the run to resume had another {', '.join(changed)}",
                    "call it as before, or without --resume to begin anew",
                )
            while self._part(self.done).exists():
                self.done += 1
            return
        for file in self.directory.iterdir():
            if file.name != "lock":
                file.unlink()
        write_json(marker, self._key)

    def _part(self, number: int) -> Path:
        return self.directory / f"{number}.parquet"

    def _rejected(self, number: int) -> Path:
        return self.directory / f"{number}.tsv"

    def add(self, tables: Sequence[pa.Table], rejected: bytes) -> None:
        """Make the next part durable: its rows, and lines about its rejected rows."""
        with atomic_path(self._rejected(self.done)) as temporary:
            temporary.write_bytes(rejected)
        table = pa.concat_tables(tables)
        with atomic_path(self._part(self.done)) as temporary:
            pq.write_table(
                table, temporary, row_group_size=_ROW_GROUP_ROWS, write_page_checksum=True
            )
        self.done += 1

    @property
    def rows(self) -> int:
        """Rows in the parts so far."""
        return sum(pq.read_metadata(self._part(number)).num_rows for number in range(self.done))

    def finish(self, rejected_file: Path) -> tuple[int, int]:
        """Join the parts into the output, and their rejected rows into another file if any.

        Returns:
            How many rows, and how many rejected ones.
        """
        bad = sum(self._lines(number) for number in range(self.done))
        if bad:
            with atomic_path(rejected_file) as temporary, open(temporary, "wb") as out:
                out.write(b"line\treason\traw\n")
                for number in range(self.done):
                    out.write(self._rejected(number).read_bytes())
        rows = 0
        with atomic_path(self.output) as temporary:
            with pq.ParquetFile(self._part(0)) as first:
                schema = first.schema_arrow
            with pq.ParquetWriter(temporary, schema, write_page_checksum=True) as writer:
                for table in self._groups():
                    writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
                    rows += len(table)
        self.done = 0  # they are in the output: not worth keeping
        return rows, bad

    def _lines(self, number: int) -> int:
        return self._rejected(number).read_bytes().count(b"\n")

    def _groups(self) -> Iterator[pa.Table]:
        for number in range(self.done):
            with pq.ParquetFile(self._part(number)) as part:
                for index in range(part.num_row_groups):
                    yield part.read_row_group(index)
