"""Rows of row group slices one after the other, whichever thread decodes them."""

from __future__ import annotations

import collections

import numpy as np

from nvt_torchrec.nvt_loader.parquet.row_chunks import Buffers


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
