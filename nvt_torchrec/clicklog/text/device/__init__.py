"""Text in Criteo's format → typed columns, on a card.

A text in which a line breaks a rule is left to :mod:`clicklog.text.tokenizer`, which parses it
again. So errors are described, and rows left out of columns, in one place alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nvt_torchrec.base.device import Device, DeviceArray
from nvt_torchrec.formats.feature_spec import FeatureSpec

_NEWLINE = 10


@dataclasses.dataclass(frozen=True)
class RawDeviceRows:
    """``n`` lines of a text, parsed on a card: the columns of ``RawRows``.

    Kernels may still write them, so that all but the number of lines must be read on the same
    stream.

    Attributes:
        label: uint8 [n], 0 or 1.
        dense: int32 [dense columns, n]; 0 where missing.
        categorical: uint32 [categorical columns, n]; 0 where missing.
        missing: uint64 [2, n], bit j set where dense column j (in the first row) or categorical
            column j (in the second one) is missing.
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
    """Return the first ``size`` bytes of a buffer as whole lines.

    Args:
        text: uint8, with room for a byte more than ``size``, which becomes a newline if the last
            line has none.
        size: How many bytes were read into it.
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
    which waits until the card has parsed them.

    Args:
        device: The card.
        text: uint8 [bytes] on the card, ending with a newline, or empty; see :func:`pad_text`.
        spec: The columns, in order; its ``is_criteo_format`` is true.
        limit: How many bytes a line may have, without its newline.
    """
    from nvt_torchrec.clicklog.text.device import parse_kernels as kernels

    arrays = device.arrays
    # Threads count the newlines of spans; their running sum tells each thread the number of its
    # first line, so that all can write the offsets at once.
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
