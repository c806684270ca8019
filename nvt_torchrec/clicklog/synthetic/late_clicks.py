"""Move the clicks of a synthetic log to separate files, at later times than their rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import mask_to_arrow, to_arrow
from nvt_torchrec.clicklog.synthetic.event_log import BEGIN, format_seconds

#: The part of the spec for the label of such a log.
FILE_LABEL = """[label]
name = "click"
from = "clicks*.csv"
key = "impression"
within = "6h"
"""
#: The mean and the largest delay of a click, in seconds.
_MEAN_DELAY = 3_600
_MAX_DELAY = 6 * 3_600


def take_clicks(
    table: pa.Table, seconds: np.ndarray, seed: int
) -> tuple[pa.Table, pa.Table, np.ndarray]:
    """Separate the clicks from a log.

    Args:
        table: The log, in the order of time, with a column ``click``.
        seconds: The times of its rows, int64 [rows], since :data:`.event_log.BEGIN`.
        seed: The seed of the delays.

    Returns:
        The log with a column ``impression`` instead of ``click``; the clicks in the order of time,
        with the columns ``time`` and ``impression``; and the times of the clicks, int64, since
        :data:`.event_log.BEGIN`.
    """
    random = np.random.default_rng([seed, 1])
    clicked = table["click"].to_numpy() == 1
    impression = to_arrow(np.arange(len(table)))
    delays = random.exponential(_MEAN_DELAY, len(table)).astype(np.int64)
    arrived = (seconds + np.minimum(delays, _MAX_DELAY))[clicked]
    order = np.argsort(arrived, kind="stable")
    clicks = {
        "time": format_seconds(BEGIN + arrived[order]),
        "impression": impression.filter(mask_to_arrow(clicked)).take(to_arrow(order)),
    }
    log = table.drop_columns(["click"]).append_column("impression", impression)
    return log, pa.table(clicks), arrived[order]
