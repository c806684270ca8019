"""Feature spec → NVTabular Workflow.

Categorical columns: ``Categorify``. Missing values keep id 1, so nothing is filled before it.

Dense columns, for a value x, missing values filled first:

* ``log_normalize``: z = (y − mean) / std with y = log(max(x, −2) + 3)
* ``log``: y alone, float32, what TorchRec's NVTabular script does (its FillMissing, +2, LogOp)
* ``normalize``: (x − mean) / std

Mean and standard deviation (n − 1 in the denominator) are of the training days, in float64.
The bound −2 is below every value of the real log but a handful; without it the logarithm of
x ≤ −3 is −inf or NaN, and Normalize turns the whole column into NaN.
"""

from __future__ import annotations

import warnings
from itertools import groupby

import nvt_compat  # noqa: F401

import numpy as np
import nvtabular
from nvtabular import ops

from clicklog.spec import FeatureSpec

DENSE_MINIMUM = -2
DENSE_SHIFT = 3


def log_of_shifted(column):
    """log(x + 3) in float64; x ≥ −2 keeps it ≥ 0."""
    return np.log(column.astype("float64") + DENSE_SHIFT)


def build(
    spec: FeatureSpec, categories_path: str = "./", *, label: bool = True
) -> nvtabular.Workflow:
    """An unfitted Workflow.

    Output columns: ids int32, dense float32, label float32 as it comes; order as in the spec only
    after selecting ``spec.columns``.

    Args:
        spec: columns, vocabulary policies and the dense transform.
        categories_path: directory in which fitting writes the vocabularies.
        label: pass the label through (training), or work without such a column (inference).
    """
    nodes = [
        *_categorical(spec, categories_path),
        *_dense(spec),
        *([nvtabular.ColumnSelector([spec.label])] if label else []),
    ]
    output = nodes[0]
    for node in nodes[1:]:
        output = output + node
    return nvtabular.Workflow(output)


def _categorical(spec: FeatureSpec, categories_path: str) -> list:
    """One Categorify for each vocabulary policy."""

    def policy(column):
        return column.freq_threshold, column.max_table_size, column.num_buckets

    nodes = []
    for key, columns in groupby(sorted(spec.categorical, key=policy), key=policy):
        freq_threshold, max_table_size, num_buckets = key
        with warnings.catch_warnings():
            # "do not expect CPU and GPU hashes to agree": documented where num_buckets is.
            warnings.filterwarnings("ignore", message="Performing a hash-based transformation")
            operator = ops.Categorify(
                freq_threshold=freq_threshold,
                max_size=max_table_size,
                num_buckets=num_buckets or None,
                out_path=str(categories_path),
                dtype=np.dtype("int32"),
                cat_cache="host",
            )
        nodes.append([column.name for column in columns] >> operator)
    return nodes


def _dense(spec: FeatureSpec) -> list:
    """One chain for each fill value."""
    nodes = []
    by_fill = sorted(spec.dense, key=lambda column: column.fill)
    for fill, columns in groupby(by_fill, key=lambda column: column.fill):
        node = [column.name for column in columns] >> ops.FillMissing(fill)
        if spec.dense_transform in ("log_normalize", "log"):
            last = spec.dense_transform == "log"
            node = (
                node
                >> ops.Clip(min_value=DENSE_MINIMUM)
                >> ops.LambdaOp(log_of_shifted, dtype=np.float64)
            )
            if last:
                node = node >> ops.LambdaOp(as_float32, dtype=np.float32)
        if spec.dense_transform in ("log_normalize", "normalize"):
            node = node >> ops.Normalize(out_dtype=np.float32)
        nodes.append(node)
    return nodes


def as_float32(column):
    """The training parquet holds float32."""
    return column.astype("float32")
