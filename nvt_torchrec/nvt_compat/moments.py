"""Mean and variance by merging deviations from the mean, instead of sums of squares.

The released Normalize computes the variance as Σx² − (Σx)²/n. Where values are large compared with
their spread, or all equal, the difference consists of rounding errors: a column that was always
missing got a standard deviation of 3e-8, and its first present value became a feature of 3e7.

Here chunks give count, mean and the sum of squared deviations, which merge without cancellation
(Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances,
1979). The mean is stored as an offset from the chunk's first value, so that the spread of equal
values is 0 and that of close values is exact. Chunks are merged in order, so the result does not
depend on the workers.
"""

from __future__ import annotations

from nvt_torchrec.nvt_compat.patching import replace

import numpy as np
import pandas as pd


def _chunkwise_moments(df) -> pd.DataFrame:
    """Return count, origin, mean − origin and sum of squared deviations by column, in float64."""
    from merlin.core.dispatch import flatten_list_column_values, is_list_dtype

    rows = {}
    for name in df.columns:
        column = df[name]
        if is_list_dtype(column):
            column = flatten_list_column_values(column)
        column = column.dropna().astype("float64")
        if not len(column):
            rows[name] = (0, 0.0, 0.0, 0.0)
            continue
        origin = float(column.iloc[0])
        column = column - origin
        offset = float(column.mean())
        rows[name] = (len(column), origin, offset, float(((column - offset) ** 2).sum()))
    names = ["count", "origin", "offset", "m2"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=names)


def _tree_node_moments(inputs: list[pd.DataFrame]) -> pd.DataFrame:
    merged = inputs[0]
    for other in inputs[1:]:
        count = merged["count"] + other["count"]
        share = (other["count"] / count).where(count > 0, 0.0)
        delta = other["origin"] - merged["origin"] + (other["offset"] - merged["offset"])
        m2 = merged["m2"] + other["m2"] + delta**2 * merged["count"] * share
        frame = merged.assign(count=count, offset=merged["offset"] + delta * share, m2=m2)
        # where one of the two has no rows, the other is the result
        frame = frame.where(other["count"] > 0, merged)
        merged = frame.where(merged["count"] > 0, other)
    return merged


def _finalize_moments(inp: pd.DataFrame, ddof: int = 1) -> pd.DataFrame:
    degrees = inp["count"] - ddof
    variance = (inp["m2"] / degrees).where(degrees > 0, np.nan)
    mean = (inp["origin"] + inp["offset"]).where(inp["count"] > 0, np.nan)
    return pd.DataFrame(
        {"count": inp["count"], "mean": mean, "var": variance, "std": np.sqrt(variance)}
    )


def apply() -> None:
    """Replace the three steps of NVTabular's moments."""
    from nvtabular.ops import moments

    for name, function, expect in (
        ("_chunkwise_moments", _chunkwise_moments, "squaredsum"),
        ("_tree_node_moments", _tree_node_moments, "squaredsum"),
        ("_finalize_moments", _finalize_moments, "x2 - x**2 / n"),
    ):
        replace(moments, name, function, expect=expect)
