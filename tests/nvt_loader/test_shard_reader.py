"""Rows of row group slices one after the other, whichever thread decodes them."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.nvt_loader.parquet.row_chunks import Buffers, RowGroupSlice, ShardReader


@dataclasses.dataclass
class Numbers:
    """Rows that are numbers."""

    begin: int
    end: int

    @property
    def rows(self):
        return self.end - self.begin

    def slice(self, begin, end):
        return Numbers(self.begin + begin, self.begin + end)


SLICES = [RowGroupSlice(0, 0, 10), RowGroupSlice(1, 10, 13), RowGroupSlice(2, 13, 50)]


def decoder(broken=None):
    """A decoder that fails in row group ``broken``, and the list of the threads that called it."""
    threads = []

    def decode(part, rows):
        for begin in range(part.begin, part.end, rows):
            threads.append(threading.current_thread().name)
            if part.row_group == broken:
                raise BadInputError(f"part {broken}", "none")
            yield Numbers(begin, min(begin + rows, part.end))

    return decode, threads


def taken(reader, rows):
    return [row for part in reader.take(rows) for row in range(part.begin, part.end)]


def test_no_more_is_decoded_than_enough():
    decode, threads = decoder()
    reader = ShardReader(decode, SLICES, 2, 4)
    with concurrent.futures.ThreadPoolExecutor(1, "pool") as pool:
        taken(reader, 1)
        for _ in range(5):
            reader.decode_ahead(pool)
    assert 4 <= reader.left < 8
    assert len(threads) == 1 + sum(name.startswith("pool") for name in threads)


def test_what_is_left_while_others_decode():
    reader = ShardReader(decoder()[0], SLICES, 2, 4)
    end = threading.Event()

    def decode():
        while not end.is_set():
            reader._ready.append(Numbers(0, 1))
            reader._ready.popleft()

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        assert {reader.left for _ in range(20_000)} <= {0, 1}
    finally:
        end.set()
        thread.join()


def test_a_buffer_that_another_thread_takes():
    class Racing(collections.deque):
        def popleft(self):
            found = super().popleft()
            self.clear()
            return found

    buffers = Buffers()
    for sizes in ([100, 100], [10, 100]):
        buffers._free = Racing(np.empty(size, np.uint8) for size in sizes)
        assert len(buffers.take(100)) == 100
        buffers._free = Racing(np.empty(size, np.uint8) for size in sizes)
        assert len(buffers.take(1_000_000)) == 1_000_000
