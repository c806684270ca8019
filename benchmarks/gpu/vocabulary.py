"""Encoding with as many ids as MLPerf's largest table has, all in one column."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import torch

from benchmarks.gpu.measure import Result, seconds_of
from benchmarks.gpu.worker import GpuSettings
from nvt_torchrec.formats.missing import empty_mask
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.workflows import FittedVocabulary, compiled, inspect, to_frame, write_workflow
from nvt_torchrec.workflows.writer import Fitted

CASE = "encode, one column"
_ROWS = 1 << 20
#: An odd factor: values of distinct numbers are distinct modulo 2^32, and in no order.
_FACTOR = np.uint32(2654435761)


def vocabulary(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Rows/s of the compiled workflow on one thread, and of NVTabular on the device."""
    count = args.max_table_rows
    spec = FeatureSpec("label", (), (CategoricalColumn("c"),))
    values = (np.arange(count, dtype=np.uint32) * _FACTOR).astype(np.int64)
    fitted = FittedVocabulary(
        values, np.arange(count, 0, -1), {"null": 0, "oov": 0, "unique": count * (count + 1) // 2}
    )
    expected = np.random.default_rng(0).integers(count, size=_ROWS)
    rows = _rows(values[expected].astype(np.uint32))
    with tempfile.TemporaryDirectory(dir=args.data) as folder:
        write_workflow(folder, spec, Fitted({}, {"c": fitted}), threads=4)
        on_host = compiled.load(folder)
        _check(on_host.transform(rows).ids, expected)
        took = seconds_of(lambda: on_host.transform(rows), torch.device("cpu"), args.seconds)
        yield _result("compiled, one thread", count, took)
        if device.type == "cuda" and find_spec("cudf"):
            yield from _on_device(folder, rows, expected, count, device, args.seconds)


def _on_device(
    folder: str,
    rows: RawRows,
    expected: np.ndarray,
    count: int,
    device: torch.device,
    seconds: float,
) -> Iterator[Result]:
    """The dask engine's encoding, once with the vocabulary on the device, once without."""
    from merlin.dag import Graph
    from nvtabular.ops import Categorify

    from nvt_torchrec.etl.engines.dask import transform_frame
    from nvt_torchrec.workflows import load

    workflow, schema = load(folder), inspect(folder).table_schema
    frame = to_frame(rows, inspect(folder).spec, gpu=True)
    for place in ("host", "device"):
        for node in Graph.get_nodes_by_op_type([workflow.output_node], Categorify):
            node.op.cat_cache = place
        table = transform_frame(frame, workflow, schema, gpu=True)
        _check(table["c"].to_numpy()[np.newaxis], expected)
        took = seconds_of(
            lambda: transform_frame(frame, workflow, schema, gpu=True), device, seconds
        )
        yield _result(f"NVTabular, vocabulary on the {place}", count, took)


def _rows(values: np.ndarray) -> RawRows:
    count = len(values)
    return RawRows(
        label=np.zeros(count, np.uint8),
        dense=np.empty((0, count), np.int32),
        dense_missing=empty_mask(0, count),
        categorical=values[np.newaxis],
        categorical_missing=empty_mask(1, count),
        line=np.arange(count),
        bad=[],
        bad_count=0,
        lines=count,
    )


def _check(ids: np.ndarray, expected: np.ndarray) -> None:
    if not np.array_equal(ids[0], expected + CategoricalColumn("c").reserved_ids):
        raise SystemExit("wrong: other ids than the vocabulary's")


def _result(system: str, count: int, took: float) -> Result:
    return {
        "system": system,
        "case": f"{CASE} of {count:,} ids",
        "rows_per_s": _ROWS / took,
        "ms": 1e3 * took,
    }
