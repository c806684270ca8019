"""A format of your own: Arrow's IPC files (Feather), which pyarrow reads and this project does not.

    python own_format.py clicks.arrow OUT

One class, and a line in each registry. Tables subclass TableFormat, whose rows have numbers; text
with a row in each line subclasses TextFormat. Every program that reads such a log or its workflow
imports this module; workers of --engine dask do, so the lines stand above `if __name__ == …`.
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
    """An open file. Rows are decoded by groups, which here are the record batches."""

    def __init__(self, reader):
        self.reader = reader
        self.schema = reader.schema
        self.rows = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]

    def decode(self, groups, names, chunk_rows):
        """Yield the rows of some batches. Chunks may have more rows than chunk_rows."""
        for group in groups:
            table = pa.Table.from_batches([self.reader.get_batch(group)])
            if names:  # a field of a struct is named COLUMN.FIELD
                table = table.select([name.partition(".")[0] for name in names])
            yield table


class ArrowFile(TableFormat):
    """Files of record batches."""

    @classmethod
    def recognizes(cls, path, head):
        """Tell `guess` by the first bytes."""
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
