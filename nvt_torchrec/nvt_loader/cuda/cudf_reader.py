"""Decode row groups on a GPU with libcudf. Importing this module needs pylibcudf.

On a machine without a GPU, tests replace libcudf by a stand-in that decodes with Arrow.
:class:`ReadAhead` decodes the row groups of the next blocks while the last one is put in order, in
a thread and on a stream of its own.
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

#: Bytes of rows that one call decodes. libcudf needs about as much again meanwhile.
CALL_BYTES = 256 << 20


class CudfReader:
    """Reads whole row groups, several in one call, which takes about as long for ten as for one.

    Numbers of other types than the loader's are converted. libcudf does not verify page checksums.
    """

    def __init__(self, dataset: Dataset, stream: torch.cuda.Stream) -> None:
        """Read on ``stream``, which must be the current one."""
        assert dataset.files is not None
        self._dataset, self._files = dataset, dataset.files
        self._stream = stream
        self._checker = DeviceChecker(dataset, stream.device)
        self._lists = set(dataset.schema.multi_hot)
        self._groups: weakref.WeakValueDictionary[int, DeviceRowGroup] = (
            weakref.WeakValueDictionary()
        )
        self._footer = functools.lru_cache(MAX_FOOTERS)(self._read_footer)

    def decode(self, part: RowGroupSlice, _rows: int) -> Iterator[DeviceRowGroupSlice]:
        """Yield a slice of a row group that :meth:`read` decodes later (a ``Decoder``)."""
        group = self._groups.setdefault(part.row_group, DeviceRowGroup(part.row_group))
        yield DeviceRowGroupSlice(group, part.begin, part.end)

    def read(self, groups: Iterable[DeviceRowGroup]) -> None:
        """Decode those row groups that are not decoded yet.

        Raises:
            BadInputError: A file cannot be read or has changed since planning.
            SchemaError: A null, infinity or NaN, or an id outside its table.
        """
        wanted = {group.number: group for group in groups if group.decoded is None}
        for numbers in self._calls(sorted(wanted)):
            for number, rows in zip(numbers, self._read_call(numbers), strict=True):
                wanted[number].decoded = rows

    def _calls(self, numbers: list[int]) -> Iterator[list[int]]:
        """Divide row groups among calls of at most :data:`CALL_BYTES`, or one larger row group."""
        call: list[int] = []
        call_bytes = 0.0
        for number in numbers:
            size = self._dataset.batch_row_bytes * self._files.row_groups[number].rows
            if call and call_bytes + size > CALL_BYTES:
                yield call
                call, call_bytes = [], 0.0
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
            # Copies in torch's memory: another stream uses them, of which libcudf's memory does not
            # know.
            return rows.split([self._files.row_groups[number].rows for number in numbers])
        except ClickLogError:
            if len(numbers) == 1:
                raise
            # Read one by one, so that the error names the file and row group. Files of different
            # types, which libcudf refuses in one call, are read that way, too.
            return [self._read_call([number])[0] for number in numbers]

    def _read_columns(self, numbers: list[int]) -> dict[str, Any]:
        """Read libcudf's columns. Raises OSError for any error that libcudf finds in the files."""
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
            footers = [self._footer(file) for file in files]
            read = plc.io.parquet.read_parquet(options, self._stream, parquet_metadatas=footers)
        # The errors that pylibcudf makes of C++ exceptions.
        except (RuntimeError, ValueError, IndexError) as error:
            if "CUDA error" in str(error) or "cudaError" in str(error):
                raise  # an error of the device, not of the file
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
    """Row groups that are decoded in a thread of their own.

    Args:
        reader: The reader, used in that thread only.
        stream: The stream that it reads on; None in tests on a CPU, where there are no streams.
        device: The device that it reads to.
    """

    def __init__(
        self, reader: CudfReader, stream: torch.cuda.Stream | None, device: torch.device
    ) -> None:
        self._reader, self._stream = reader, stream
        self.decode = reader.decode
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, "nvt_loader_read", use_device, (device,)
        )

    def begin(self, groups: Iterable[DeviceRowGroup]) -> None:
        """Decode together those row groups whose decoding has not begun."""
        wanted = [group for group in _drop_duplicates(groups) if group.reading is None]
        if wanted:
            task = self._pool.submit(self._read, wanted)
            for group in wanted:
                group.reading = task

    def finish(self, groups: Iterable[DeviceRowGroup], stream: torch.cuda.Stream | None) -> None:
        """Wait until row groups are decoded, and let ``stream`` wait for the device.

        Raises:
            BadInputError, SchemaError: As :meth:`CudfReader.read`.
        """
        groups = _drop_duplicates(groups)
        self.begin(groups)
        # One task decodes several row groups and is awaited once.
        for task in dict.fromkeys(group.reading for group in groups):
            assert task is not None, "`begin` gives each row group a task"
            ready = task.result()
            if ready is not None:
                assert stream is not None, "row groups decoded on a stream are awaited on one"
                stream.wait_event(ready)
        if stream is not None:
            for group in groups:
                for tensor in group.get_rows().tensors:
                    tensor.record_stream(stream)

    def close(self) -> None:
        """End the thread, after what it has begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, groups: list[DeviceRowGroup]) -> torch.cuda.Event | None:
        """Decode row groups; return an event that follows the work, if there is a stream."""
        with torch.cuda.stream(self._stream):  # does nothing for None
            self._reader.read(groups)
            return None if self._stream is None else self._stream.record_event()


def _drop_duplicates(groups: Iterable[DeviceRowGroup]) -> list[DeviceRowGroup]:
    """Return each row group once: several slices of a block may lie in the same one."""
    return list({group.number: group for group in groups}.values())
