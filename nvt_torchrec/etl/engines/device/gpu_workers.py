"""Count and encode blocks on the GPUs of a Dask cluster's workers, for logs in Criteo's format.

A task consists of many blocks, of which a worker has several in flight
(:mod:`etl.engines.device.device_blocks`). A worker with two threads runs two tasks at once, which
share the GPU, its lanes and the workflow: while the last blocks of one task are written and synced,
the other one fills the lanes. Vocabularies and rows equal the host's bit by bit, and do not depend
on the division into tasks, because runs are added up in the order of their blocks.

One task at a time has run on one H200 (docs/gpu.md). Two tasks at once, and several GPUs, have not.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow.parquet as pq
from distributed import Client

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.device import Device, find_difference
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.files.atomic import publish
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.engines import host
from nvt_torchrec.etl.engines.cluster import POOL_SHARE
from nvt_torchrec.etl.engines.device import gpu_memory, supports
from nvt_torchrec.etl.engines.device.device_blocks import (
    LANES,
    Gpu,
    count_block,
    encode_unit,
    merge_runs,
)
from nvt_torchrec.etl.engines.engine import Job
from nvt_torchrec.etl.engines.runs import FAN_IN, SortedRun, run_name, write_run
from nvt_torchrec.etl.state.output import FIT, PARTS
from nvt_torchrec.etl.units.unit_plan import Unit
from nvt_torchrec.etl.units.writing import UnitResult, open_recorder
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled import CompiledWorkflow
from nvt_torchrec.workflows.compiled.device import DeviceWorkflow, count_vocabulary_bytes

log = logging.getLogger(__name__)

_Item = TypeVar("_Item")
#: The number of threads of a task: more than lanes, because not all work of a block needs the GPU.
LANE_THREADS = 2 * LANES
#: The maximum number of blocks of a task. Larger tasks leave lanes idle less often: a task cannot
#: fill them while its last blocks are finished.
TASK_BLOCKS = 4 * FAN_IN
#: The share of a worker's memory pool that vocabularies may take; blocks in flight take the rest.
VOCABULARY_SHARE = 0.6
#: The maximum relative difference of dense values.
_TOLERANCE = 1e-6


def takes(spec: FeatureSpec, blocks: Iterable[Block]) -> bool:
    """Return True if the blocks are whole and the spec is supported on GPUs."""
    return supports(spec) and all(type(block) is Block for block in blocks)


def has_room(workflow_path: Path, client: Client) -> bool:
    """Return True if the vocabularies fit into each worker's GPU; else log a warning."""
    needed = count_vocabulary_bytes(compiled.load(workflow_path))
    room = int(VOCABULARY_SHARE * POOL_SHARE * min(client.run(gpu_memory).values(), default=0))
    if needed > room:
        log.warning(
            "the vocabularies take %.1f GB, more than the %.1f GB available to them on a GPU, so "
            "the workers encode on their CPUs, which is slower; --engine cpu may be faster",
            needed / 1e9, room / 1e9,
        )  # fmt: skip
    return needed <= room


def divide_tasks(items: Sequence[_Item], client: Client) -> list[list[_Item]]:
    """Divide items among tasks: large ones, but at least one for each thread of the workers.

    Two tasks of a GPU share its lanes evenly. If they were of equal size, both would end at the
    same time, and the lanes would be idle until the next two have begun. So the first task of each
    worker is half as large: from then on, one task is halfway through when the other one ends.
    """
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    threads = sum(worker["nthreads"] for worker in workers)
    small_tasks = len(workers) if threads > len(workers) else 0
    half_tasks = max(1, 2 * threads - small_tasks)
    size = max(1, min(TASK_BLOCKS, -(-2 * len(items) // half_tasks)))
    tasks: list[list[_Item]] = []
    begin = 0
    while begin < len(items):
        end = begin + (-(-size // 2) if len(tasks) < small_tasks else size)
        tasks.append(list(items[begin:end]))
        begin = end
    return tasks


def _group_neighbours(indices: Iterable[int]) -> Iterator[list[int]]:
    """Divide increasing numbers of blocks into consecutive ranges; each becomes one run.

    :class:`etl.engines.runs.Runs` would merge the same ranges.
    """
    for _, several in itertools.groupby(indices, lambda index: index // FAN_IN):
        group: list[int] = []
        for index in several:
            if group and index != group[-1] + 1:
                yield group
                group = []
            group.append(index)
        yield group


def count_blocks(numbered: list[tuple[int, Block]], *, job: Job) -> int:
    """Count blocks in a worker, and write a run for each group durably; return the row count."""
    gpu = get_worker_gpu()
    total = 0
    count = functools.partial(count_block, gpu, spec=job.spec, max_bad_rows=job.max_bad_rows)
    blocks = [block for _, block in numbered]
    # A whole group is counted ahead, so that the lanes stay busy while the group before is merged.
    counting = map_in_order(count, blocks, LANE_THREADS, "lane", ahead=FAN_IN)
    with contextlib.closing(counting) as counted:  # type: ignore[type-var]
        for group in _group_neighbours(index for index, _ in numbered):
            run = merge_runs(gpu, list(itertools.islice(counted, len(group))))
            write_run(job.work / FIT / run_name(group[0], group[-1] + 1), run)
            total += run.rows
    return total


def encode_units(units: list[Unit], *, job: Job, workflow: tuple[str, str]) -> list[UnitResult]:
    """Encode units in a worker; write their parts, rejected rows and records, durably."""
    gpu = get_worker_gpu()
    loaded, on_host = load_once(gpu.device, *workflow)

    def encode_one(unit: Unit) -> list[UnitResult]:
        log.debug("begin %s", unit.file)
        results, written = encode_unit(
            gpu, unit, loaded, on_host, job.work, max_bad_rows=job.max_bad_rows
        )
        syncer.add(written, results)
        return results

    with open_recorder(job.work, LANE_THREADS) as syncer:
        encoded = map_in_order(encode_one, units, LANE_THREADS, "lane", ahead=len(units))
        return list(itertools.chain.from_iterable(encoded))


#: Held while objects are made that the tasks of this process share. If two tasks begin at once,
#: lru_cache would make each object twice, and the GPU may not have room for two workflows.
_making = threading.Lock()


def get_worker_gpu() -> Gpu:
    """Return the GPU of this process; pinned memory and streams are made once."""
    with _making:
        return _make_gpu(make_device())


@functools.lru_cache(maxsize=1)
def make_device() -> Device:
    """Return the device of this process."""
    return Device()


@functools.lru_cache(maxsize=1)
def _make_gpu(device: Device) -> Gpu:
    return Gpu(device)


def load_once(device: Device, path: str, digest: str) -> tuple[DeviceWorkflow, CompiledWorkflow]:
    """Load a workflow and copy it to the GPU; keep the last one loaded.

    See :func:`etl.engines.workers._load_once`.
    """
    with _making:
        return _load(device, path, digest)


@functools.lru_cache(maxsize=1)
def _load(device: Device, path: str, digest: str) -> tuple[DeviceWorkflow, CompiledWorkflow]:
    workflow = compiled.load(path)
    return DeviceWorkflow(device, workflow), workflow


# ---- the first block, counted and encoded by the host as well, and compared


def compare_counts(job: Job, block: Block) -> str:
    """Count a block on the GPU and on the host; return what differs, "" for nothing."""

    def compute_on_gpu() -> Mapping[str, np.ndarray]:
        gpu = get_worker_gpu()
        counted = count_block(gpu, block, job.spec, max_bad_rows=job.max_bad_rows)
        return _name_arrays(merge_runs(gpu, [counted]), job.spec)

    def compute_on_host() -> Mapping[str, np.ndarray]:
        return _name_arrays(host.count_block(block, job.spec, job.max_bad_rows), job.spec)

    return _compare(compute_on_gpu, compute_on_host)


def _name_arrays(run: SortedRun, spec: FeatureSpec) -> dict[str, np.ndarray]:
    arrays = {"rows": np.array(run.rows), "nulls": run.nulls, "moments": run.moments}
    for name, counts in zip(spec.vocabularies, run.counts, strict=True):
        arrays |= {f"values of {name}": counts.values, f"counts of {name}": counts.counts}
    return arrays


def compare_codes(job: Job, unit: Unit, workflow: tuple[str, str]) -> str:
    """Encode and write a unit on the GPU and on the host; return what differs, "" for nothing.

    Args:
        job: The job.
        unit: A whole block.
        workflow: The path of the saved workflow, and the digest of its description.
    """
    with tempfile.TemporaryDirectory(dir=job.work, prefix="compared") as temporary:
        ours, theirs = Path(temporary, "gpu"), Path(temporary, "host")

        def compute_on_gpu() -> Mapping[str, np.ndarray]:
            gpu = get_worker_gpu()
            loaded, on_host = load_once(gpu.device, *workflow)
            _, written = encode_unit(
                gpu, unit, loaded, on_host, ours, max_bad_rows=job.max_bad_rows
            )
            publish(written)
            return _read_columns(ours / PARTS / unit.file)

        def compute_on_host() -> Mapping[str, np.ndarray]:
            loaded = compiled.load(Path(workflow[0]))
            _, written = host.encode_block((unit,), loaded, theirs, max_bad_rows=job.max_bad_rows)
            publish(written)
            return _read_columns(theirs / PARTS / unit.file)

        return _compare(compute_on_gpu, compute_on_host)


def _read_columns(part: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(part)
    return {name: to_numpy(table[name].combine_chunks()) for name in table.column_names}


def _compare(
    on_gpu: Callable[[], Mapping[str, Any]], on_host: Callable[[], Mapping[str, Any]]
) -> str:
    """Return what differs, "" for nothing, or where the host raises an error."""
    try:
        expected = on_host()
    except ClickLogError:  # the run will raise it, at the row that comes first
        return ""
    return find_difference(on_gpu, expected, _TOLERANCE)
