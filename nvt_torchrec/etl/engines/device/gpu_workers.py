"""Count and encode blocks on the cards of a Dask cluster's workers, for logs in Criteo's format.

A task is many blocks, of which a worker has several in flight
(:mod:`etl.engines.device.device_blocks`). A worker with two threads does two tasks at once, which
share the card, its lanes and the workflow: while one waits for its last blocks to be written and
synced, the other fills the lanes. Vocabularies and rows are those of the host, bit by bit, however
the blocks are divided among tasks: runs are added up in the order of their blocks.

One task at a time has run on one H200 (docs/gpu.md); neither two nor several cards have.
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
    Card,
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
#: Threads of a task. There are more than lanes, because not all work of a block needs the card.
LANE_THREADS = 2 * LANES
#: Blocks of a task at most. At its end it leaves lanes free for as long as a few blocks take.
TASK_BLOCKS = 4 * FAN_IN
#: The share of a worker's memory pool that vocabularies may take; blocks in flight take the rest.
VOCABULARY_SHARE = 0.6
#: By how much dense values may differ, as a share of their magnitude.
_TOLERANCE = 1e-6


def takes(spec: FeatureSpec, blocks: Iterable[Block]) -> bool:
    """Return whether blocks can be processed here: whole blocks of a spec that is supported."""
    return supports(spec) and all(type(block) is Block for block in blocks)


def has_room(workflow_path: Path, client: Client) -> bool:
    """Return whether a workflow's vocabularies fit into each worker's GPU; log if they do not."""
    needed = count_vocabulary_bytes(compiled.load(workflow_path))
    room = int(VOCABULARY_SHARE * POOL_SHARE * min(client.run(gpu_memory).values(), default=0))
    if needed > room:
        log.warning(
            "the vocabularies take %.1f GB, more than the %.1f GB that there is for them on a GPU, "
            "so that the slower functions encode which need less; --engine cpu may be faster",
            needed / 1e9, room / 1e9,
        )  # fmt: skip
    return needed <= room


def divide_tasks(items: Sequence[_Item], client: Client) -> list[list[_Item]]:
    """Divide items among tasks: large ones, but at least one for each thread of the workers.

    Tasks that share a card share its lanes evenly. If all were of one size, those that begin
    together would end together, and the lanes would run dry between them. So the first task of each
    worker is half as large, and from then on one of two is in its middle when the other ends.
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
    """Divide increasing numbers of blocks into ranges that one run is written for.

    They are ranges that :class:`etl.engines.runs.Runs` could have merged itself.
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
    """Count blocks in a worker, and write a run for each group durably; return their rows."""
    card, total = worker_card(), 0
    count = functools.partial(count_block, card, spec=job.spec, max_bad_rows=job.max_bad_rows)
    blocks = [block for _, block in numbered]
    # as many ahead as are merged at once, so that the lanes go on meanwhile
    counting = map_in_order(count, blocks, LANE_THREADS, "lane", ahead=FAN_IN)
    with contextlib.closing(counting) as counted:  # type: ignore[type-var]
        for group in _group_neighbours(index for index, _ in numbered):
            run = merge_runs(card, list(itertools.islice(counted, len(group))))
            write_run(job.work / FIT / run_name(group[0], group[-1] + 1), run)
            total += run.rows
    return total


def encode_units(units: list[Unit], *, job: Job, workflow: tuple[str, str]) -> list[UnitResult]:
    """Encode units in a worker; write their parts, rejected rows and records, durably."""
    card = worker_card()
    loaded, on_host = load_once(card.device, *workflow)

    def encode_one(unit: Unit) -> list[UnitResult]:
        log.debug("begin %s", unit.file)
        results, written = encode_unit(
            card, unit, loaded, on_host, job.work, max_bad_rows=job.max_bad_rows
        )
        syncer.add(written, results)
        return results

    with open_recorder(job.work, LANE_THREADS) as syncer:
        encoded = map_in_order(encode_one, units, LANE_THREADS, "lane", ahead=len(units))
        return list(itertools.chain.from_iterable(encoded))


#: Held while something is made that the tasks of this process share. Two may begin at once, and
#: lru_cache would then make two of it: tables that fit the card once need not fit it twice.
_making = threading.Lock()


def worker_card() -> Card:
    """Return the card of this process; pinned memory and streams are made once."""
    with _making:
        return _get_card(make_device())


@functools.lru_cache(maxsize=1)
def make_device() -> Device:
    """Return the device of this process."""
    return Device()


@functools.lru_cache(maxsize=1)
def _get_card(device: Device) -> Card:
    return Card(device)


def load_once(device: Device, path: str, digest: str) -> tuple[DeviceWorkflow, CompiledWorkflow]:
    """Load a workflow and copy it to the card; keep the last one loaded.

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
    """Count a block on the card and on the host; return what differs, "" for nothing."""

    def compute_on_card() -> Mapping[str, np.ndarray]:
        card = worker_card()
        counted = count_block(card, block, job.spec, max_bad_rows=job.max_bad_rows)
        return _name_arrays(merge_runs(card, [counted]), job.spec)

    def compute_on_host() -> Mapping[str, np.ndarray]:
        return _name_arrays(host.count_block(block, job.spec, job.max_bad_rows), job.spec)

    return _compare(compute_on_card, compute_on_host)


def _name_arrays(run: SortedRun, spec: FeatureSpec) -> dict[str, np.ndarray]:
    arrays = {"rows": np.array(run.rows), "nulls": run.nulls, "moments": run.moments}
    for name, counts in zip(spec.vocabularies, run.counts, strict=True):
        arrays |= {f"values of {name}": counts.values, f"counts of {name}": counts.counts}
    return arrays


def compare_codes(job: Job, unit: Unit, workflow: tuple[str, str]) -> str:
    """Encode and write a unit on the card and on the host; return what differs, "" for nothing.

    Args:
        job: The job.
        unit: A whole block.
        workflow: The path of the saved workflow, and the digest of its description.
    """
    with tempfile.TemporaryDirectory(dir=job.work, prefix="compared") as temporary:
        ours, theirs = Path(temporary, "card"), Path(temporary, "host")

        def compute_on_card() -> Mapping[str, np.ndarray]:
            card = worker_card()
            loaded, on_host = load_once(card.device, *workflow)
            _, written = encode_unit(
                card, unit, loaded, on_host, ours, max_bad_rows=job.max_bad_rows
            )
            publish(written)
            return _read_columns(ours / PARTS / unit.file)

        def compute_on_host() -> Mapping[str, np.ndarray]:
            loaded = compiled.load(Path(workflow[0]))
            _, written = host.encode_block((unit,), loaded, theirs, max_bad_rows=job.max_bad_rows)
            publish(written)
            return _read_columns(theirs / PARTS / unit.file)

        return _compare(compute_on_card, compute_on_host)


def _read_columns(part: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(part)
    return {name: to_numpy(table[name].combine_chunks()) for name in table.column_names}


def _compare(
    on_card: Callable[[], Mapping[str, Any]], on_host: Callable[[], Mapping[str, Any]]
) -> str:
    """Return what differs, "" for nothing, or where the host raises an error."""
    try:
        expected = on_host()
    except ClickLogError:  # the run will raise it, at the row that comes first
        return ""
    return find_difference(on_card, expected, _TOLERANCE)
