"""Decode row groups on a GPU with libcudf. Importing this module requires pylibcudf.

On a machine without a GPU, tests replace libcudf by a fake that decodes with Arrow.
:class:`ReadAhead` decodes the row groups of the next blocks in its own thread and on its own
stream, while the rows of the current block are arranged.
"""

from __future__ import annotations

import concurrent.futures
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pylibcudf as plc
import torch
from torch.utils.dlpack import from_dlpack

from nvt_torchrec.base.device import use_device
from nvt_torchrec.base.errors import ClickLogError, SchemaError
from nvt_torchrec.nvt_loader.cuda.device_rows import (
    DeviceChecker,
    DeviceRowGroup,
    DeviceRowGroupSlice,
    DeviceRows,
    ListColumn,
)
from nvt_torchrec.nvt_loader.parquet.checks import FILL_REMEDY
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset, error_context
from nvt_torchrec.nvt_loader.parquet.files import MAX_FOOTERS
from nvt_torchrec.nvt_loader.parquet.row_chunks import RowGroupSlice

#: The maximum number of bytes of rows that one call decodes. libcudf needs about as much memory
#: again during the call.
CALL_BYTES = 256 << 20


class CudfReader:
    """Reads whole row groups, several per call, because ten take about as long as one.

    Columns of other numeric types are converted to the loader's. libcudf does not verify page
    checksums.
    """

    def __init__(self, dataset: Dataset, stream: torch.cuda.Stream) -> None:
        """Read on ``stream``, which must be the current one."""
        assert dataset.files is not None
        self._dataset = dataset
        self._files = dataset.files
        self._stream = stream
        self._checker = DeviceChecker(dataset, stream.device)
        self._lists = set(dataset.schema.multi_hot)
        self._groups: weakref.WeakValueDictionary[int, DeviceRowGroup] = (
            weakref.WeakValueDictionary()
        )
        self._read_cached_footer = functools.lru_cache(MAX_FOOTERS)(self._read_footer)

    def decode(self, part: RowGroupSlice, _rows: int) -> Iterator[DeviceRowGroupSlice]:
        """Yield a slice of a row group, which :meth:`read` decodes later (a ``Decoder``)."""
        group = self._groups.setdefault(part.row_group, DeviceRowGroup(part.row_group))
        yield DeviceRowGroupSlice(group, part.begin, part.end)

    def read(self, groups: Iterable[DeviceRowGroup]) -> None:
        """Decode the row groups that are not decoded yet.

        Raises:
            BadInputError: A file cannot be read or has changed since planning.
            SchemaError: A value is null, infinite or NaN, or an id is outside its table.
        """
        wanted = {group.number: group for group in groups if group.decoded is None}
        for numbers in self._divide_into_calls(sorted(wanted)):
            for number, rows in zip(numbers, self._read_call(numbers), strict=True):
                wanted[number].decoded = rows

    def _divide_into_calls(self, numbers: list[int]) -> Iterator[list[int]]:
        """Divide row groups among calls of at most :data:`CALL_BYTES` or a single row group."""
        call: list[int] = []
        call_bytes = 0.0
        for number in numbers:
            size = self._dataset.batch_row_bytes * self._files.row_groups[number].rows
            if call and call_bytes + size > CALL_BYTES:
                yield call
                call = []
                call_bytes = 0.0
            call.append(number)
            call_bytes += size
        if call:
            yield call

    def _read_call(self, numbers: list[int]) -> list[DeviceRows]:
        """Decode row groups into consecutive rows; ``numbers`` are ascending."""
        where, _ = self._dataset.locate(numbers[0])
        try:
            with error_context(self._dataset, numbers[0]):
                rows = self._to_rows(self._read_columns(numbers), where)
                rows = self._checker.check(rows, where)
            # `split` copies the rows to torch's memory, because another stream uses them, and
            # libcudf would free its own memory without waiting for that stream.
            return rows.split([self._files.row_groups[number].rows for number in numbers])
        except ClickLogError:
            if len(numbers) == 1:
                raise
            # Read the row groups one by one, so that the error names the file and row group. This
            # also reads files of different types, which libcudf refuses to read in one call.
            return [self._read_call([number])[0] for number in numbers]

    def _read_columns(self, numbers: list[int]) -> dict[str, Any]:
        """Read the columns of row groups with libcudf.

        Raises:
            BadInputError: A file has changed since planning.
            OSError: libcudf cannot read the files.
        """
        files: dict[int, list[int]] = {}
        for number in numbers:
            group = self._files.row_groups[number]
            files.setdefault(group.file, []).append(group.index)
            self._files.read_footer(number)  # refuses a file that has changed
        source = plc.io.SourceInfo([str(self._files.find_path(file)) for file in files])
        options = plc.io.parquet.ParquetReaderOptions.builder(source).build()
        options.set_column_names(self._dataset.schema.columns)
        options.set_row_groups(list(files.values()))
        try:
            footers = [self._read_cached_footer(file) for file in files]
            read = plc.io.parquet.read_parquet(options, self._stream, parquet_metadatas=footers)
        # pylibcudf translates C++ exceptions to these.
        except (RuntimeError, ValueError, IndexError) as error:
            if "CUDA error" in str(error) or "cudaError" in str(error):
                raise  # the device failed; the file may be intact
            raise OSError(str(error)) from error
        return dict(zip(read.column_names(), read.columns, strict=True))

    def _read_footer(self, file: int) -> Any:
        source = plc.io.SourceInfo([str(self._files.find_path(file))])
        return plc.io.parquet_metadata.read_parquet_footers(source)[0]

    def _to_rows(self, columns: dict[str, Any], where: str) -> DeviceRows:
        """Convert libcudf's columns to tensors. Raises :class:`SchemaError` for a null."""
        schema = self._dataset.schema
        for name, column in columns.items():
            child = column.list_view().child() if name in self._lists else column
            nulls = column.null_count() or child.null_count()
            if nulls:
                raise SchemaError(f"{where}: column {name} holds {nulls} null values", FILL_REMEDY)
        floats = self._stack([columns[name] for name in schema.floats], torch.float32)
        single = [columns[name] for name in schema.categorical if name not in self._lists]
        ids = self._stack_ids(single) if single else floats[:, :0].to(torch.int32)
        lists = tuple(self._convert_lists(columns[name]) for name in schema.multi_hot)
        return DeviceRows(len(floats), floats, ids, lists)

    def _convert_lists(self, column: Any) -> ListColumn:
        view = column.list_view()
        offsets = self._to_tensor([view.offsets()]).view(-1)
        return offsets, self._stack_ids([view.child()]).view(-1)

    def _stack_ids(self, columns: list[Any]) -> torch.Tensor:
        """Convert columns to int32, or to int64 if one is wider: [rows, columns]."""
        narrow = all(column.type().id() == plc.TypeId.INT32 for column in columns)
        return self._stack(columns, torch.int32 if narrow else torch.int64)

    def _stack(self, columns: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """Convert columns to one type: [rows, columns]."""
        if len({column.type().id() for column in columns}) == 1:
            return self._to_tensor(columns).to(dtype)
        return torch.cat([self._to_tensor([column]).to(dtype) for column in columns], dim=1)

    def _to_tensor(self, columns: list[Any]) -> torch.Tensor:
        """Copy columns of one type to a tensor [rows, columns], on the device."""
        if columns[0].size() == 0:  # libcudf cannot convert an empty table
            device = self._stream.device
            return torch.empty(0, len(columns), dtype=torch.int32, device=device)
        capsule = plc.interop.to_dlpack(plc.Table(columns), self._stream)
        return from_dlpack(capsule).view(-1, len(columns))  # one column has one dimension


class ReadAhead:
    """Decodes row groups in a separate thread.

    Args:
        reader: The reader, which only that thread uses.
        stream: The stream to read on; None in tests on a CPU, which has no streams.
        device: The device of the decoded rows.
    """

    def __init__(
        self, reader: CudfReader, stream: torch.cuda.Stream | None, device: torch.device
    ) -> None:
        self._reader = reader
        self._stream = stream
        self.decode = reader.decode
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, "nvt_loader_read", use_device, (device,)
        )

    def begin(self, groups: Iterable[DeviceRowGroup]) -> None:
        """Start to decode, in one task, the row groups whose decoding has not begun."""
        wanted = [group for group in _drop_duplicates(groups) if group.reading is None]
        if wanted:
            task = self._pool.submit(self._read, wanted)
            for group in wanted:
                group.reading = task

    def finish(self, groups: Iterable[DeviceRowGroup], stream: torch.cuda.Stream | None) -> None:
        """Wait until row groups are decoded, and let ``stream`` wait for the device's work on them.

        Raises:
            BadInputError, SchemaError: As for :meth:`CudfReader.read`.
        """
        groups = _drop_duplicates(groups)
        self.begin(groups)
        # A task may decode several row groups but is awaited only once.
        for task in dict.fromkeys(group.reading for group in groups):
            assert task is not None, "`begin` gives each row group a task"
            ready = task.result()
            if ready is not None:
                assert stream is not None, "row groups decoded on a stream need a stream to wait"
                stream.wait_event(ready)
        if stream is not None:
            for group in groups:
                for tensor in group.get_rows().tensors:
                    tensor.record_stream(stream)

    def close(self) -> None:
        """End the thread after its current task."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, groups: list[DeviceRowGroup]) -> torch.cuda.Event | None:
        """Decode row groups; return an event recorded after the work, or None without a stream."""
        with torch.cuda.stream(self._stream):  # does nothing for None
            self._reader.read(groups)
            return None if self._stream is None else self._stream.record_event()


def _drop_duplicates(groups: Iterable[DeviceRowGroup]) -> list[DeviceRowGroup]:
    """Return each row group once: several slices of a block may be in the same row group."""
    return list({group.number: group for group in groups}.values())
