"""The ETL's kernels, counts and parquet on the card, each compared with the host's, value by value.

The tests that do not need a card run the kernels in a simulator and let Arrow write the parquet.
This is what they cannot see: compiled kernels, CuPy's functions, blocks on several streams at once,
and libcudf's writer.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.gpu.smokes import CASE
from benchmarks.gpu.worker import GpuSettings, Result, check
from nvt_torchrec.base.threads import in_order
from nvt_torchrec.clicklog.readers.raw import Block, find_days, read_block
from nvt_torchrec.clicklog.synthetic.log import SyntheticSettings, synthesize
from nvt_torchrec.etl.parquet import write_descriptions, write_part
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.toml_file import load_spec
from nvt_torchrec.formats.splits import SPLITS

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.device.blocks import Card

#: More than a row group.
_ROWS = 150_000
#: Lines that a synthetic log may lack: integers beyond the table of results, and missing values.
_LINES = b"1" + 13 * b"\t2147483647" + 26 * b"\tFFFFffff" + b"\r\n"
_LINES += b"0" + 13 * b"\t-2147483648" + 26 * b"\t0" + b"\n0" + 39 * b"\t" + b"\n"


def card(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Parse, count, encode and write a small log as the ETL's workers do."""
    from nvt_torchrec.etl.engines.device.workers import worker_card

    with tempfile.TemporaryDirectory() as folder:
        synthesize(folder, SyntheticSettings(1, _ROWS, cardinality_scale=0.05))
        with open(Path(folder, "day_0"), "ab") as log:
            log.write(_LINES)
        (day,) = find_days(folder)
        block = Block(day.path, 0, day.size, day.source)
        yield from compared(worker_card(), block, load_spec(), Path(folder))


def compared(there: Card, block: Block, spec: FeatureSpec, directory: Path) -> Iterator[Result]:
    """Do each step on the card, and compare what it gives with the host's.

    Args:
        there: The card.
        block: A block of well-formed rows.
        spec: A spec of Criteo's format.
        directory: A directory for a workflow and for parquet.

    Yields:
        The milliseconds of each step, with the time in which its kernels were compiled.
    """
    from nvt_torchrec.etl.engines import block as host_functions
    from nvt_torchrec.etl.engines.device.blocks import count_block, merge_runs
    from nvt_torchrec.etl.engines.device.parquet import write_on_device
    from nvt_torchrec.etl.engines.device.workers import LANE_THREADS
    from nvt_torchrec.workflows import compiled
    from nvt_torchrec.workflows.compiled.device import DeviceWorkflow

    device, rows = there.device, read_block(block, spec)
    with there.lane() as lane:
        begin = time.perf_counter()
        parsed = there.parse(lane, block, spec)
        check(parsed is not None, "the card takes well-formed rows for malformed ones")
        arrays = [parsed.label, parsed.dense, parsed.categorical, parsed.missing]
        found = [device.download(array) for array in arrays]
        yield _result("parse", begin)
    masks = np.concatenate([rows.dense_missing, rows.categorical_missing])
    expected = [rows.label, rows.dense, rows.categorical, masks]
    names = ("labels", "integers", "categories", "masks")
    for name, values, other in zip(names, found, expected, strict=True):
        _same(f"parse: {name}", values, other)

    begin = time.perf_counter()
    blocks = [block] * LANE_THREADS
    count = functools.partial(count_block, there, spec=spec, reject=False)
    runs = in_order(count, blocks, LANE_THREADS, "lane")
    run, host = merge_runs(there, list(runs)), host_functions.count_block(block, spec, reject=False)
    yield _result(f"count and merge {len(blocks)} blocks at once", begin)
    _same("count: missing values", run.nulls, len(blocks) * host.nulls)
    _same("count: moments", run.moments, np.concatenate([host.moments] * len(blocks)))
    for name, counts, other in zip(spec.vocabularies, run.counts, host.counts, strict=True):
        _same(f"count: values of {name}", counts.values, other.values)
        _same(f"count: how often they occur, {name}", counts.counts, len(blocks) * other.counts)

    write_fitted(directory, block, spec)
    on_host = compiled.load(directory / "workflow")
    with there.lane():
        begin = time.perf_counter()
        workflow = DeviceWorkflow(device, on_host)
        encoded = workflow.transform(parsed.dense, parsed.categorical, parsed.missing)
        ids, dense = device.download(encoded.ids), device.download(encoded.dense)
        yield _result("encode", begin)
        expected = on_host.transform(rows)
        _same("encode: ids", ids, expected.ids)
        _same("encode: dense values", dense.view(np.uint32), expected.dense.view(np.uint32))
        begin = time.perf_counter()
        split = directory / "split"
        for name in SPLITS:
            (split / name).mkdir(parents=True)
        ours, other = "train/part.0.parquet", "train/part.1.parquet"
        write_on_device(
            device, parsed.label, encoded.dense, encoded.ids, workflow.schema, split / ours
        )
        write_part(compiled.to_table(expected, workflow.schema), split / other)
        write_descriptions(split, [ours, other], workflow.schema)  # merges their footers
        yield _result("write", begin)
    _same_file(split / ours, split / other)


def write_fitted(directory: Path, block: Block, spec: FeatureSpec) -> None:
    """Write a workflow fitted on the block, as ``directory/workflow``."""
    from nvt_torchrec.etl.engines import fitting, threads
    from nvt_torchrec.workflows import write_workflow

    threads.count([block], spec, directory / "fit", workers=1, reject=False)
    fitted = fitting.fit([block], spec, directory / "fit")
    write_workflow(directory / "workflow", spec, fitted)


def _same_file(ours: Path, other: Path) -> None:
    """Compare two parts: columns, rows and row groups."""
    found, expected = (pq.read_table(path) for path in (ours, other))
    same = found.schema.remove_metadata() == expected.schema.remove_metadata()
    check(same, f"write: the schema is {found.schema}")
    for name in expected.column_names:
        _same(f"write: column {name}", found[name].to_numpy(), expected[name].to_numpy())
    footers = [pq.read_metadata(path) for path in (ours, other)]
    sizes = [[f.row_group(i).num_rows for i in range(f.num_row_groups)] for f in footers]
    check(sizes[0] == sizes[1], f"write: row groups of {sizes[0]} rows, the host's {sizes[1]}")


def _result(step: str, begin: float) -> Result:
    took = time.perf_counter() - begin
    return {"system": f"the card as the host: {step}", "case": CASE, "ms": 1e3 * took}


def _same(what: str, found: np.ndarray, expected: np.ndarray) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    check(
        found.shape == expected.shape,
        f"{what}: shape {found.shape}, the host's {expected.shape}",
    )
    places = np.argwhere(found != expected)
    if len(places):
        at = tuple(places[0].tolist())
        check(
            False,
            f"{what}: {len(places)} of {found.size} differ, first at {at}: {found[at]}, the host's "
            f"{expected[at]}",
        )
