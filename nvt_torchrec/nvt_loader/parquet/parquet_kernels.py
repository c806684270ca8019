"""Compiled loops that copy columns into batch-major memory, without the interpreter lock.

The loops take addresses (of Arrow's buffers, or of the bytes of a file). So one call handles all
columns, and nothing is recompiled for another number of columns. The caller keeps the memory alive.
Addresses, and loops that count from zero, also allow vector instructions, which an index that might
be negative prevents. Addresses need no alignment on the processors that PyTorch supports. Floats
are copied as their bits.

A *copy* describes a move of consecutive rows of a chunk. For flat blocks, copies are int64
[copies, 5]: step, chunk, first row in the chunk, number of rows, first row in the batch. For blocks
with lists, they are int64 [copies, 4], sorted by position in the target: chunk, first row in the
chunk, number of rows, and the element of the target where column 0 begins.
"""

from __future__ import annotations

import numba
import numpy as np

from nvt_torchrec.base.hashing import splitmix64
from nvt_torchrec.base.kernels import compiled, pointer

#: The number of rows whose columns are interleaved at a time: they fit in a core's cache.
TILE_ROWS = 256


@numba.njit(inline="always")
def _interleave(target, columns, addresses, first, first_row, count):
    """Copy rows of adjacent columns to the address ``target``, in row-major order.

    Args:
        target: The address of the result, 4 bytes per value.
        columns: The number of columns.
        addresses: int64, the address of row 0 of each column.
        first: The index of the first column in ``addresses``.
        first_row: The first row.
        count: The number of rows.
    """
    if columns == 1:
        # Without a stride the compiler uses vector instructions.
        source = numba.carray(pointer(addresses[first] + first_row * 4), (1,), np.int32)
        to = numba.carray(pointer(target), (1,), np.int32)
        for i in range(count):
            to[i] = source[i]
        return
    for tile in range(0, count, TILE_ROWS):
        for c in range(columns):
            address = addresses[first + c] + (first_row + tile) * 4
            source = numba.carray(pointer(address), (1,), np.int32)
            to = numba.carray(pointer(target + (tile * columns + c) * 4), (1,), np.int32)
            for i in range(min(TILE_ROWS, count - tile)):
                # An unsigned index needs no test for negative values.
                to[np.uint64(i * columns)] = source[i]


@compiled(
    "void(int32[:, ::1], int32[:, ::1], int32[:, ::1], int32[::1], int64[::1], int64[:, ::1],"
    " int64, int64, int64)"
)
def copy_rows(labels, weights, dense, ids, addresses, copies, batch, first, rows):
    """Copy rows [first, first + rows) of a source to their positions in a block.

    Args:
        labels, weights, dense: int32 [steps · B, columns], output: the block's float columns.
        ids: int32, output: the block's ids [steps, categorical columns, B], flattened.
        addresses: int64 [columns], the address of row ``first`` of each column, in the order
            labels, weight, dense, categorical.
        copies: int64 [copies, 5], from :func:`find_copies` with all rows of the source in one
            chunk.
        batch: B.
        first: The index of the first row in the source.
        rows: The number of rows.
    """
    widths = labels.shape[1], weights.shape[1], dense.shape[1]
    targets = labels.ctypes.data, weights.ctypes.data, dense.ctypes.data
    num_floats = sum(widths)
    num_ids = len(addresses) - num_floats
    for k in range(len(copies)):
        step, _, copy_begin, copy_count, batch_row = copies[k]
        # The part of the copy within rows [first, first + rows).
        begin = max(copy_begin, first)
        count = min(copy_begin + copy_count, first + rows) - begin
        if count <= 0:
            continue
        batch_row += begin - copy_begin
        source_row = begin - first
        column = 0
        for part in range(3):
            to = targets[part] + (step * batch + batch_row) * widths[part] * 4
            _interleave(to, widths[part], addresses, column, source_row, count)
            column += widths[part]
        for c in range(num_ids):
            source_address = addresses[num_floats + c] + source_row * 4
            source = numba.carray(pointer(source_address), (1,), np.int32)
            address = ids.ctypes.data + ((step * num_ids + c) * batch + batch_row) * 4
            to = numba.carray(pointer(address), (1,), np.int32)
            for i in range(count):
                to[i] = source[i]


@compiled("int64(int64[:, ::1], int64, int64, int64, int64, int64, int64[::1], int64)", nogil=False)
def find_copies(found, steps, width, begin, end, first, chunk_rows, first_chunk):
    """Find the copies of a source's rows that belong to this rank.

    The source gives ``width`` rows to each step, and rows [begin, end) of them are this rank's.

    Args:
        found: Output, int64 [steps + chunks, 5]: the copies.
        steps: The number of steps of the block.
        width, begin, end, first: As in :class:`nvt_loader.cpu.blocks.ShardRows`.
        chunk_rows: int64 [chunks], the number of rows of each chunk, steps · width in total.
        first_chunk: The index of the first chunk.

    Returns:
        The number of copies.
    """
    count = 0
    chunk = 0
    chunk_begin = 0  # the row of the source where the chunk begins
    for step in range(steps):
        row = step * width + begin
        stop = step * width + end
        while row < stop:
            while chunk_begin + chunk_rows[chunk] <= row:
                chunk_begin += chunk_rows[chunk]
                chunk += 1
            rows = min(stop, chunk_begin + chunk_rows[chunk]) - row
            copy = found[count]
            copy[0] = step
            copy[1] = first_chunk + chunk
            copy[2] = row - chunk_begin
            copy[3] = rows
            copy[4] = first + row - step * width - begin
            count += 1
            row += rows
    return count


@compiled("void(int32[::1], int64[::1], int64, uint32[::1], uint32[::1])")
def permute(target, sources, stride, to_rows, from_rows):
    """Copy rows of several columns to other rows of a target.

    Args:
        target: Output, int32: [columns, stride], flattened.
        sources: int64 [columns], the address of each column.
        stride: The number of rows of the target.
        to_rows: uint32 [rows], the rows of the target to write.
        from_rows: uint32 [rows], the source row of each of them.
    """
    for c in range(len(sources)):
        source = numba.carray(pointer(sources[c]), (1,), np.int32)
        to = numba.carray(pointer(target.ctypes.data + c * stride * 4), (1,), np.int32)
        for i in range(len(to_rows)):
            to[to_rows[i]] = source[from_rows[i]]


@numba.njit(inline="always")
def find_largest(address, count, signed):
    """Return the largest of ``count`` 32-bit values at an address, read as unsigned integers.

    Read that way, a negative id exceeds the size of any table, so one reduction checks both bounds
    of an id. For ``signed`` floats, return the bits of the largest magnitude; from 0x7F800000 on
    they mean infinity or NaN.
    """
    words = numba.carray(pointer(address), (1,), np.uint32)
    mask = np.uint32(0x7FFFFFFF if signed else 0xFFFFFFFF)
    maximum = np.uint32(0)
    for i in range(count):
        maximum = max(maximum, words[i] & mask)
    return np.uint64(maximum)


@compiled("void(int32[::1], int64[:, ::1], boolean[::1], int64, int64[:, ::1], int64[::1])")
def write_list_lengths(lengths, offsets, is_list, stride, copies, steps):
    """Write the list lengths of all rows and columns, in the order of a block's ids.

    Args:
        lengths: Output, int32 [steps · columns · B].
        offsets: int64 [chunks, columns], the addresses of the int32 [rows + 1] offsets of lists.
        is_list: bool [columns]; columns without lists have one element per row.
        stride: B.
        copies: int64 [copies, 4].
        steps: int64 [steps + 1], the index of the first copy of each step, followed by the number
            of copies.
    """
    base = lengths.ctypes.data
    for step in range(len(steps) - 1):
        for c in range(offsets.shape[1]):
            for k in range(steps[step], steps[step + 1]):
                chunk, first, rows, element = copies[k]
                to = numba.carray(pointer(base + (element + c * stride) * 4), (1,), np.int32)
                if is_list[c]:
                    bounds = offsets[chunk, c] + first * 4
                    bounds = numba.carray(pointer(bounds), (1,), np.int32)
                    for i in range(rows):
                        to[i] = bounds[i + 1] - bounds[i]
                else:
                    for i in range(rows):
                        to[i] = 1


@compiled(
    "void(int32[::1], int64[::1], int64[:, ::1], int64[:, ::1], boolean[::1], int64,"
    " int64[:, ::1], int64[::1])"
)
def copy_list_values(target, starts, values, offsets, is_list, stride, copies, steps):
    """Copy the elements of all columns into a block.

    The rows of a copy are consecutive in both source and target, so all elements of a copy are
    consecutive, too.

    Args:
        target: Output, int32: the values of the block, flattened.
        starts: int64 [steps · columns · B], the index in ``target`` where the elements of each row
            and column begin, in the order of :func:`write_list_lengths`.
        values: int64 [chunks, columns], the addresses of the elements; 0 for a chunk without any.
        offsets, is_list, stride, copies, steps: As in :func:`write_list_lengths`.
    """
    base = target.ctypes.data
    for step in range(len(steps) - 1):
        for c in range(values.shape[1]):
            for k in range(steps[step], steps[step + 1]):
                chunk, first, rows, element = copies[k]
                begin = first
                count = rows
                if is_list[c]:
                    bounds = offsets[chunk, c] + first * 4
                    bounds = numba.carray(pointer(bounds), (1,), np.int32)
                    begin = bounds[0]
                    count = bounds[rows] - bounds[0]
                if values[chunk, c] == 0 or count == 0:
                    continue
                source = numba.carray(pointer(values[chunk, c] + begin * 4), (1,), np.int32)
                to = base + starts[element + c * stride] * 4
                to = numba.carray(pointer(to), (1,), np.int32)
                for i in range(count):
                    to[i] = source[i]


@compiled("void(int32[::1], int64[::1], int64, int64, uint32[::1], uint32[::1])")
def permute_lists(target, starts, values, offsets, to_rows, from_rows):
    """Copy lists of a column to other rows of a target.

    Args:
        target: Output, int32: the elements of all rows.
        starts: int64 [target rows], the index in ``target`` where each row's elements begin.
        values: The address of the column's elements.
        offsets: The address of the column's int32 offsets.
        to_rows: uint32 [rows], the rows of the target to write.
        from_rows: uint32 [rows], the source row of each of them.
    """
    source = numba.carray(pointer(values), (1,), np.int32)
    bounds = numba.carray(pointer(offsets), (1,), np.int32)
    for i in range(len(to_rows)):
        to = starts[to_rows[i]]
        begin = bounds[from_rows[i]]
        for k in range(bounds[from_rows[i] + np.uint32(1)] - begin):
            target[to + k] = source[begin + k]


#: The increment of SplitMix64's state, 2**64 divided by the golden ratio, as its authors chose it.
_GOLDEN_STEP = np.uint64(0x9E3779B97F4A7C15)


@compiled("void(uint64[::1], uint64)")
def fill_random_words(words, seed):
    """Fill ``words`` with SplitMix64's stream from ``seed``."""
    for i in range(len(words)):
        words[i] = splitmix64(seed + np.uint64(i + 1) * _GOLDEN_STEP)


@compiled("void(int64[::1], uint64)")
def fill_random_order(order, seed):
    """Fill ``order`` with a random permutation of 0 … len(order) - 1; its length is below 2**32.

    The algorithm is the inside-out Fisher-Yates shuffle on SplitMix64's stream.
    """
    for i in range(len(order)):
        seed += _GOLDEN_STEP
        # A random position from 0 to i by a multiplication, which is faster than a modulo: the
        # upper 32 bits of word · (i + 1), where word is a random 32-bit integer.
        word = splitmix64(seed) >> np.uint64(32)
        position = np.int64((word * np.uint64(i + 1)) >> np.uint64(32))
        order[i] = order[position]
        order[position] = i
