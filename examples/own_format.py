"""A custom file format: Arrow's IPC files (Feather), which this project cannot read by itself.

    python own_format.py clicks.arrow OUT

It takes one class, and a line in each of two registries. Formats of numbered rows subclass
TableFormat; text formats with a row per line subclass TextFormat. Every program that reads such a
log or its workflow must import this module. Workers of --engine dask import the script that started
them, so the registration must be outside of `if __name__ == "__main__"`.
"""

import contextlib
import sys

import pyarrow as pa

from nvt_torchrec import EtlSettings, run
from nvt_torchrec.clicklog.readers import READERS
from nvt_torchrec.clicklog.readers.table_rows import Table, TableFormat
from nvt_torchrec.etl.commands.guess import guess
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS, FileFormat


class OpenFile(Table):
    """An open file, whose row groups are its record batches."""

    def __init__(self, reader):
        self.reader = reader
        self.schema = reader.schema
        self.rows = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]

    def decode(self, groups, names, chunk_rows):
        """Yield the rows of the given row groups. Chunks may have more rows than chunk_rows."""
        for group in groups:
            table = pa.Table.from_batches([self.reader.get_batch(group)])
            if names:  # the name of a struct's field is COLUMN.FIELD
                table = table.select([name.partition(".")[0] for name in names])
            yield table


class ArrowFile(TableFormat):
    """Files of record batches."""

    @classmethod
    def recognizes(cls, path, head):
        """Return whether the first bytes are those of this format; `guess` calls this."""
        return head.startswith(b"ARROW1")

    @classmethod
    @contextlib.contextmanager
    def open_table(cls, path, source):
        """Open a local file."""
        with pa.memory_map(path) as file, pa.ipc.open_file(file) as reader:
            yield OpenFile(reader)


INPUT_FORMATS["arrow"] = FileFormat(endings=("arrow", "feather"))
READERS["arrow"] = ArrowFile

if __name__ == "__main__":
    log, output = sys.argv[1:]
    with open(f"{output}.toml", "w") as file:
        file.write(guess(log)[0])
    print(run(EtlSettings(log, output, f"{output}.toml", engine="cpu")).rows)
