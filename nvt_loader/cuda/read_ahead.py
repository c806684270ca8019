"""Decode the row groups of the next blocks while the last one is put in order.

Each thread reads with a reader and on a stream of its own, so that reading, upload and decoding of
consecutive blocks overlap.
"""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Iterable, Sequence

import torch

from nvt_torchrec.nvt_loader.cuda.cudf_reader import CudfReader
from nvt_torchrec.nvt_loader.cuda.device_rows import DeviceRowGroup


class ReadAhead:
    """Row groups that are decoded in other threads.

    Args:
        readers: The readers, and the stream that each reads on: a thread for each. None: there are
            no streams, in tests on a CPU.
    """

    def __init__(self, readers: Sequence[tuple[CudfReader, torch.cuda.Stream | None]]) -> None:
        self.decode = readers[0][0].decode
        self._free: queue.SimpleQueue = queue.SimpleQueue()
        for one in readers:
            self._free.put(one)
        self._pool = concurrent.futures.ThreadPoolExecutor(len(readers), "nvt_loader_read")

    def begin(self, groups: Iterable[DeviceRowGroup]) -> None:
        """Decode together those row groups that nobody has begun with."""
        wanted = list({group.number: group for group in groups if group.reading is None}.values())
        if wanted:
            task = self._pool.submit(self._read, wanted)
            for group in wanted:
                group.reading = task

    def finish(self, groups: Iterable[DeviceRowGroup], stream: torch.cuda.Stream | None) -> None:
        """Wait until row groups are decoded, and let ``stream`` wait for the device.

        Raises:
            BadInputError, SchemaError: As :meth:`CudfReader.read`.
        """
        groups = list({group.number: group for group in groups}.values())
        self.begin(groups)
        for task in {id(group.reading): group.reading for group in groups}.values():
            ready = task.result()
            if ready is not None:
                stream.wait_event(ready)
        if stream is not None:
            for group in groups:
                for tensor in group.decoded.tensors:
                    tensor.record_stream(stream)

    def close(self) -> None:
        """End the threads, after what they have begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, groups: list[DeviceRowGroup]) -> torch.cuda.Event | None:
        reader, stream = self._free.get()
        try:
            with torch.cuda.stream(stream):  # None: does nothing
                reader.read(groups)
                return None if stream is None else stream.record_event()
        finally:
            self._free.put((reader, stream))
