"""Compiled loops of the CPU path: columns into batch-major memory, without the interpreter lock.

The loops take addresses (of Arrow's buffers, of a file's bytes), so that one call handles all
columns and nothing is compiled again for another number of columns; the caller keeps the memory
alive. Addresses, and loops that count from zero, also let the compiler use vector instructions,
which an index that might be negative prevents. Addresses need no alignment on the processors that
PyTorch runs on. Floats are copied as their bits.

*Copies* say which consecutive rows go where. For flat blocks they are int64 [copies, 5]: step,
chunk, first row in the chunk, rows, place in the batch. For lists they are int64 [copies, 4], in
the order of the target: chunk, first row, rows, and the element of the target where column 0
begins.
"""

from __future__ import annotations

import numba
import numpy as np

from nvt_torchrec.base.hashing import splitmix64
from nvt_torchrec.base.kernels import compiled, pointer

#: Rows of which several columns are interleaved at a time: what fits a core's cache.
TILE_ROWS = 256


@numba.njit(inline="always")
def _interleave(target, columns, addresses, first, here, count):
    """Copy rows [here, here + count) of ``columns`` columns from number ``first`` on to the
    address ``target``, row by row."""
    if columns == 1:  # by vector instructions
        source = numba.carray(pointer(addresses[first] + here * 4), (1,), np.int32)
        to = numba.carray(pointer(target), (1,), np.int32)
        for i in range(count):
            to[i] = source[i]
        return
    for tile in range(0, count, TILE_ROWS):
        for c in range(columns):
            source = numba.carray(pointer(addresses[first + c] + (here + tile) * 4), (1,), np.int32)
            to = numba.carray(pointer(target + (tile * columns + c) * 4), (1,), np.int32)
            for i in range(min(TILE_ROWS, count - tile)):
                to[np.uint64(i * columns)] = source[i]


@compiled(
    "void(int32[:, ::1], int32[:, ::1], int32[:, ::1], int32[::1], int64[::1], int64[:, ::1],"
    " int64, int64, int64)"
)
def copy_rows(labels, weights, dense, ids, addresses, copies, batch, first, rows):
    """Copy rows [first, first + rows) of a source to their places in a block.

    Args:
        labels, weights, dense: The block's memory: [steps · B, columns] of each.
        ids: The same, flat: [steps, categorical columns, B].
        addresses: int64 [columns], where row ``first`` lies: labels, weight, dense, categorical.
        copies: int64 [copies, 5], from :func:`find_copies` with all rows of the source in one
            chunk.
        batch: B.
        first, rows: Which rows of the source.
    """
    widths = labels.shape[1], weights.shape[1], dense.shape[1]
    targets = labels.ctypes.data, weights.ctypes.data, dense.ctypes.data
    floats = sum(widths)
    categorical = len(addresses) - floats
    for k in range(len(copies)):
        step, _, begin, count, place = copies[k]
        skipped = max(first - begin, 0)
        here = max(begin, first) - first
        count = min(begin + count, first + rows) - max(begin, first)
        if count <= 0:
            continue
        place += skipped
        at = step * batch + place
        column = 0
        for part in range(3):
            to = targets[part] + at * widths[part] * 4
            _interleave(to, widths[part], addresses, column, here, count)
            column += widths[part]
        for c in range(categorical):
            source = numba.carray(pointer(addresses[floats + c] + here * 4), (1,), np.int32)
            address = ids.ctypes.data + ((step * categorical + c) * batch + place) * 4
            to = numba.carray(pointer(address), (1,), np.int32)
            for i in range(count):
                to[i] = source[i]


@compiled("int64(int64[:, ::1], int64, int64, int64, int64, int64, int64[::1], int64)", nogil=False)
def find_copies(found, steps, width, begin, end, first, chunk_rows, first_chunk):
    """Find the copies of a source's rows: of ``width`` rows in each step those in [begin, end).

    Args:
        found: int64 [steps + chunks, 5], the result.
        steps: The steps of the block.
        width, begin, end, first: See :class:`nvt_loader.cpu.blocks.ShardRows`.
        chunk_rows: int64 [chunks], the rows of each chunk; together those of all steps.
        first_chunk: The number of the first chunk.

    Returns:
        The number of copies.
    """
    count = chunk = start = 0  # start: row of the source where the chunk begins
    for step in range(steps):
        row, stop = step * width + begin, step * width + end
        while row < stop:
            while start + chunk_rows[chunk] <= row:
                start += chunk_rows[chunk]
                chunk += 1
            rows = min(stop, start + chunk_rows[chunk]) - row
            made = found[count]
            made[0], made[1], made[2], made[3] = step, first_chunk + chunk, row - start, rows
            made[4] = first + row - step * width - begin
            count += 1
            row += rows
    return count


@compiled("void(int32[::1], int64[::1], int64, uint32[::1], uint32[::1])")
def permute(target, sources, stride, to_rows, from_rows):
    """Copy columns' rows ``from_rows`` to rows ``to_rows`` of a target [columns, stride], flat."""
    for c in range(len(sources)):
        source = numba.carray(pointer(sources[c]), (1,), np.int32)
        to = numba.carray(pointer(target.ctypes.data + c * stride * 4), (1,), np.int32)
        for i in range(len(to_rows)):
            to[to_rows[i]] = source[from_rows[i]]


@numba.njit(inline="always")
def largest_of(address, count, signed):
    """Return the largest of unsigned numbers of 32 bits; of floats, the bits of the largest
    magnitude, which from 0x7F800000 on are infinity or NaN.

    Read as unsigned, a negative id is a large one: one reduction for both ends of a table.
    """
    words = numba.carray(pointer(address), (1,), np.uint32)
    mask = np.uint32(0x7FFFFFFF if signed else 0xFFFFFFFF)
    maximum = np.uint32(0)
    for i in range(count):
        maximum = max(maximum, words[i] & mask)
    return np.uint64(maximum)


@compiled("void(int32[::1], int64[:, ::1], boolean[::1], int64, int64[:, ::1], int64[::1])")
def list_lengths(lengths, offsets, is_list, stride, copies, steps):
    """Write the list lengths of all rows and columns, in the order of a block's ids.

    Args:
        lengths: int32 [steps · columns · B], the result.
        offsets: int64 [chunks, columns], addresses of int32 offsets, one more than there are rows.
        is_list: bool [columns]; the other columns have one element in each row.
        stride: B.
        copies: int64 [copies, 4].
        steps: int64 [steps + 1], the first copy of each step, and the number of copies.
    """
    base = lengths.ctypes.data
    for step in range(len(steps) - 1):
        for c in range(offsets.shape[1]):
            for k in range(steps[step], steps[step + 1]):
                chunk, first, rows, at = copies[k]
                to = numba.carray(pointer(base + (at + c * stride) * 4), (1,), np.int32)
                if is_list[c]:
                    source = offsets[chunk, c] + first * 4
                    source = numba.carray(pointer(source), (1,), np.int32)
                    for i in range(rows):
                        to[i] = source[i + 1] - source[i]
                else:
                    for i in range(rows):
                        to[i] = 1


@compiled(
    "void(int32[::1], int64[::1], int64[:, ::1], int64[:, ::1], boolean[::1], int64,"
    " int64[:, ::1], int64[::1])"
)
def list_values(target, starts, values, offsets, is_list, stride, copies, steps):
    """Copy the elements of all columns.

    The rows of a copy follow one another in source and target, so its elements are copied at once.

    Args:
        target: The values of a block, flat.
        starts: int64 [steps · columns · B], where the elements of each row and column begin in
            ``target``, in the order of :func:`list_lengths`.
        values: int64 [chunks, columns], addresses of the elements; 0 leaves the target as it is.
        offsets, is_list, stride, copies, steps: As :func:`list_lengths` takes them.
    """
    base = target.ctypes.data
    for step in range(len(steps) - 1):
        for c in range(values.shape[1]):
            for k in range(steps[step], steps[step + 1]):
                chunk, first, rows, at = copies[k]
                begin, count = first, rows
                if is_list[c]:
                    bounds = offsets[chunk, c] + first * 4
                    bounds = numba.carray(pointer(bounds), (1,), np.int32)
                    begin, count = bounds[0], bounds[rows] - bounds[0]
                if values[chunk, c] == 0 or count == 0:
                    continue
                source = numba.carray(pointer(values[chunk, c] + begin * 4), (1,), np.int32)
                to = base + starts[at + c * stride] * 4
                to = numba.carray(pointer(to), (1,), np.int32)
                for i in range(count):
                    to[i] = source[i]


@compiled("void(int32[::1], int64[::1], int64, int64, uint32[::1], uint32[::1])")
def permute_lists(target, starts, values, offsets, to_rows, from_rows):
    """Copy rows ``from_rows`` of a list column to ``target``, to ``starts[to_rows]`` and after."""
    source = numba.carray(pointer(values), (1,), np.int32)
    bounds = numba.carray(pointer(offsets), (1,), np.int32)
    for i in range(len(to_rows)):
        to = starts[to_rows[i]]
        begin = bounds[from_rows[i]]
        for k in range(bounds[from_rows[i] + np.uint32(1)] - begin):
            target[to + k] = source[begin + k]


@compiled("void(uint64[::1], uint64)")
def random_words(words, seed):
    """Fill ``words`` with SplitMix64's stream from ``seed``."""
    for i in range(len(words)):
        words[i] = splitmix64(seed + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15))


@compiled("void(int64[::1], uint64)")
def random_order(order, seed):
    """Fill ``order`` with a random permutation of 0 … len(order) - 1 < 2**32.

    By Fisher and Yates, with SplitMix64's stream.
    """
    for i in range(len(order)):
        seed += np.uint64(0x9E3779B97F4A7C15)
        high = splitmix64(seed) >> np.uint64(32)
        place = np.int64((high * np.uint64(i + 1)) >> np.uint64(32))
        order[i] = order[place]
        order[place] = i
