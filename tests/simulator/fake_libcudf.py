"""What of pylibcudf the parquet writer uses, by Arrow, and strict about how it is called.

``tests/nvt_compat/test_rapids.py`` compares the calls with the real package's signatures.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

#: What the next call of the writer raises.
failure: list[RuntimeError] = []
#: The options of each file.
written: list[dict] = []
_MODULES = ("pylibcudf", "pylibcudf.io", "pylibcudf.io.parquet", "pylibcudf.io.types")

CompressionType = SimpleNamespace(NONE="none")
StatisticsFreq = SimpleNamespace(STATISTICS_ROWGROUP="row group")
DictionaryPolicy = SimpleNamespace(ADAPTIVE="adaptive")


class Column:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @classmethod
    def from_cuda_array_interface(cls, obj: np.ndarray, stream=None) -> Column:
        assert obj.ndim == 1
        assert obj.flags.c_contiguous
        assert stream == "stream"
        return cls(obj)


class Table:
    def __init__(self, columns: list[Column]) -> None:
        assert len({len(column.array) for column in columns}) == 1
        self.columns = columns


class ColumnInMetadata:
    def set_name(self, name: str) -> ColumnInMetadata:
        self.name = name
        return self

    def set_nullability(self, nullable: bool) -> ColumnInMetadata:
        self.nullable = nullable
        return self


class TableInputMetadata:
    def __init__(self, table: Table) -> None:
        self.column_metadata = [ColumnInMetadata() for _ in table.columns]


class SinkInfo:
    def __init__(self, sinks: list[str]) -> None:
        (self.path,) = sinks
        assert isinstance(self.path, str)


class Options(dict):
    """Both the builder and what it builds."""

    def __getattr__(self, name: str):
        def set_option(value: object) -> Options:
            assert name not in self
            self[name] = value
            return self

        return set_option

    def build(self) -> Options:
        return self


class ChunkedParquetWriterOptions:
    @staticmethod
    def builder(sink: SinkInfo) -> Options:
        return Options(path=sink.path)


class ChunkedParquetWriter:
    """A row group for each table, as long as it is not larger than a row group may be."""

    def __init__(self, options: Options) -> None:
        self._options = options
        written.append(options)
        described = options["metadata"].column_metadata
        self._fields = [(column.name, column.nullable) for column in described]
        self._writer: pq.ParquetWriter | None = None

    @staticmethod
    def from_options(options: Options, stream=None) -> ChunkedParquetWriter:
        assert stream == "stream"
        return ChunkedParquetWriter(options)

    def write(self, table: Table) -> None:
        if failure:
            Path(self._options["path"]).write_bytes(b"PAR1")
            raise failure.pop()
        arrays = [pa.array(column.array) for column in table.columns]
        schema = pa.schema(
            [
                pa.field(name, array.type, nullable=nullable)
                for (name, nullable), array in zip(self._fields, arrays, strict=True)
            ]
        )
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._options["path"], schema, compression="none")
        rows = self._options["row_group_size_rows"]
        assert len(arrays[0]) <= rows
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=schema), rows)

    def close(self, metadata_file_path: list) -> None:
        assert metadata_file_path == []
        self._writer.close()


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the ETL write by this module."""
    failure.clear()
    written.clear()
    own = sys.modules[__name__]
    for name in _MODULES:
        module = ModuleType(name)
        module.__dict__.update({key: value for key, value in vars(own).items() if key[0] != "_"})
        patch.setitem(sys.modules, name, module)
