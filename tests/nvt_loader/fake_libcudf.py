"""What of pylibcudf the loader uses, on a CPU: by Arrow, and strict about how it is called."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nvt_torchrec.base.device import fall_back
from nvt_torchrec.nvt_loader.cpu.block_builder import CpuBuilder
from nvt_torchrec.nvt_loader.cuda import builders as gpu

#: Row groups of each call of ``read_parquet``, file by file.
calls: list[list[list[int]]] = []


@dataclasses.dataclass
class Column:
    array: pa.Array

    def size(self):
        return len(self.array)

    def null_count(self):
        return self.array.null_count

    def type(self):
        return SimpleNamespace(id=lambda: str(self.array.type))

    def list_view(self):
        return SimpleNamespace(
            offsets=lambda: Column(self.array.offsets), child=lambda: Column(self.array.values)
        )


@dataclasses.dataclass
class Table:
    columns: list[Column]


class Options:
    def __init__(self, source):
        self.source = source

    def set_column_names(self, names):
        self.names = names

    def set_row_groups(self, groups):
        assert len(groups) == len(self.source)
        assert all(own == sorted(set(own)) for own in groups)
        self.groups = groups


def read_parquet(options, stream=None, mr=None, parquet_metadatas=None):
    assert hasattr(stream, "__cuda_stream__")
    assert [footer.num_row_groups for footer in parquet_metadatas]
    assert len(set(options.source)) == len(options.source) == len(parquet_metadatas)
    calls.append(options.groups)
    tables = [
        pq.ParquetFile(path).read_row_groups(groups, columns=options.names)
        for path, groups in zip(options.source, options.groups, strict=True)
    ]
    if len({str(table.schema.types) for table in tables}) > 1:
        raise RuntimeError("CUDF failure: all sources must have the same schema")
    table = pa.concat_tables(tables).combine_chunks().select(options.names)
    columns = [Column(_narrow(pa.concat_arrays(column.chunks))) for column in table.columns]
    return SimpleNamespace(column_names=lambda: list(options.names), columns=columns)


def _narrow(array):
    """libcudf has one type of lists."""
    if pa.types.is_large_list(array.type):
        return array.cast(pa.list_(array.type.value_type))
    return array


def to_dlpack(table, stream=None, mr=None):
    columns = [np.asarray(column.array) for column in table.columns]
    assert len({column.dtype for column in columns}) == 1
    assert len(columns[0])
    if len(columns) == 1:
        return torch.utils.dlpack.to_dlpack(torch.from_numpy(columns[0].copy()))
    return torch.utils.dlpack.to_dlpack(torch.from_numpy(np.stack(columns)).t())


TypeId = SimpleNamespace(INT32="int32")
interop = SimpleNamespace(to_dlpack=to_dlpack)
io = SimpleNamespace(
    SourceInfo=list,
    parquet=SimpleNamespace(
        ParquetReaderOptions=SimpleNamespace(
            builder=lambda source: SimpleNamespace(build=lambda: Options(source))
        ),
        read_parquet=read_parquet,
    ),
    parquet_metadata=SimpleNamespace(
        read_parquet_footers=lambda source: [pq.read_metadata(path) for path in source]
    ),
)


CUDF_READER = "nvt_torchrec.nvt_loader.cuda.cudf_reader"


class Blocks(CpuBuilder):
    """What :class:`nvt_loader.cuda.builders.CudfBuilder` does, in CPU memory."""

    on_device, host_kind = gpu.CudfBuilder.on_device, CpuBuilder
    _stream = None

    def __init__(self, dataset, device, threads=1):
        super().__init__(dataset, device, threads)
        stream = SimpleNamespace(device=self.device, __cuda_stream__=lambda: (0, 0))
        ahead = importlib.import_module(CUDF_READER)
        self.reading = ahead.ReadAhead(ahead.CudfReader(dataset, stream), None, self.device)
        self.decode = self.reading.decode
        self.host = CpuBuilder(dataset, device, threads)

    build, read_ahead = gpu.CudfBuilder.build, gpu.CudfBuilder.read_ahead

    def close(self):
        self.reading.close()
        self.host.close()
        super().close()


def install(patch: pytest.MonkeyPatch, *, strict: bool = True) -> None:
    """Let loaders on the CPU decode as on a GPU, except where they undersample.

    Args:
        patch: Undoes it at the end of the test.
        strict: Whether a first block that differs from the host's is an error for every loader.
    """
    choose = gpu.choose_builder
    calls.clear()
    patch.setitem(sys.modules, "pylibcudf", sys.modules[__name__])
    patch.setitem(sys.modules, CUDF_READER, None)  # and back at the end
    del sys.modules[CUDF_READER]
    importlib.import_module(CUDF_READER)
    patch.setattr(
        "nvt_torchrec.nvt_loader.loader.choose_builder",
        lambda dataset, device: choose(dataset, device) if dataset.undersampling else Blocks,
    )
    if strict:
        patch.setattr(
            "nvt_torchrec.nvt_loader.loader.fall_back",
            lambda *given, strict: fall_back(*given, strict=True),
        )
