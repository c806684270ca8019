"""Parse text in Criteo's format to typed columns on a GPU.

A text with a malformed line is parsed again by :mod:`clicklog.text.tokenizer`, so that bad rows are
described and removed in one place only.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nvt_torchrec.base.device import Device, DeviceArray
from nvt_torchrec.formats.feature_spec import FeatureSpec

_NEWLINE = 10


@dataclasses.dataclass(frozen=True)
class RawDeviceRows:
    """The columns of ``n`` rows on a GPU, from a text without malformed lines.

    Kernels may still write them, so that all but the number of lines must be read on the same
    stream.

    Attributes:
        label: uint8 [n], 0 or 1.
        dense: int32 [dense columns, n]; 0 where missing.
        categorical: uint32 [categorical columns, n]; 0 where missing.
        missing: uint64 [2, n], with bit j set where dense column j (in the first row) or
            categorical column j (in the second row) is missing.
        ends: int64 [n], the offset of each line's newline in the text.
        malformed: int32 [1], not 0 if a line is malformed, or longer than the limit; what the
            columns hold is then undefined.
    """

    label: DeviceArray
    dense: DeviceArray
    categorical: DeviceArray
    missing: DeviceArray
    ends: DeviceArray
    malformed: DeviceArray

    def __len__(self) -> int:
        return self.ends.shape[0]


def pad_text(text: np.ndarray, size: int) -> np.ndarray:
    """Return the first ``size`` bytes of a buffer as whole lines, adding a newline if needed.

    Args:
        text: The buffer, uint8, with room for one byte more than ``size``.
        size: The number of bytes that were read into it.
    """
    if size and text[size - 1] != _NEWLINE:
        text[size] = _NEWLINE
        size += 1
    return text[:size]


def parse_on_device(
    device: Device, text: DeviceArray, spec: FeatureSpec, limit: int
) -> RawDeviceRows:
    """Parse whole lines that begin with the label; wait for their number alone.

    The caller has time for the host's part of the work before it asks whether a line is malformed,
    which waits until the GPU has parsed them.

    Args:
        device: The GPU.
        text: uint8 [bytes] on the GPU, ending with a newline, or empty; see :func:`pad_text`.
        spec: The columns, in order; its ``is_criteo_format`` is true.
        limit: The largest length of a line in bytes, without its newline.
    """
    from nvt_torchrec.clicklog.text.device import parse_kernels as kernels

    arrays = device.arrays
    # Each thread counts the newlines of a span. The running sum of the counts tells each thread the
    # number of its first line, so that all threads can write the offsets in parallel.
    spans = -(-len(text) // kernels.SPAN_BYTES)
    counts = arrays.empty(spans, np.int64)
    device.launch(kernels.count_line_ends, spans, text, counts)
    lines_until = arrays.cumsum(counts)
    lines = int(device.download(lines_until[-1:])[0]) if spans else 0
    ends = arrays.empty(lines, np.int64)
    rows = RawDeviceRows(
        label=arrays.empty(lines, np.uint8),
        dense=arrays.empty((len(spec.dense), lines), np.int32),
        categorical=arrays.empty((len(spec.categorical), lines), np.uint32),
        missing=arrays.empty((2, lines), np.uint64),
        ends=ends,
        malformed=arrays.zeros(1, np.int32),
    )
    device.launch(kernels.write_line_ends, spans, text, lines_until, ends)
    device.launch(
        kernels.parse_lines, lines, text, ends, limit,
        rows.label, rows.dense, rows.categorical, rows.missing, rows.malformed,
    )  # fmt: skip
    return rows
