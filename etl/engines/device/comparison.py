"""The first block of a run on a card, counted and encoded by the host as well, and compared."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from distributed import Client

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.device_check import difference, fall_back
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.files.atomic import publish
from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines import block as host
from nvt_torchrec.etl.engines.device import workers as device
from nvt_torchrec.etl.engines.device.blocks import count_block, encode_unit, merge_runs
from nvt_torchrec.etl.engines.runs import Run
from nvt_torchrec.etl.engines.workers import with_workflow
from nvt_torchrec.etl.plan import Unit
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.workflows import compiled

#: By how much dense values may differ, as a share of their magnitude.
_TOLERANCE = 1e-6


def counts_agree(
    client: Client, block: Block, spec: FeatureSpec, *, reject: bool | int, strict: bool
) -> bool:
    """Return whether a worker's card counts a block as the host does; warn if it does not.

    Raises:
        DeviceError: It does not, and ``strict`` is set.
    """
    why = client.submit(_compare_counts, block, spec, reject, pure=False).result()
    if why:
        fall_back("counting on the GPU", why, "the CPU counts", strict=strict)
    return not why


def codes_agree(
    client: Client, unit: Unit, workflow: Path, work: Path, *, reject: bool | int, strict: bool
) -> bool:
    """Return whether a worker's card encodes and writes a unit as the host does, like counts.

    Args:
        client: The cluster.
        unit: A whole block.
        workflow: The path of the saved workflow.
        work: A directory that the worker can write to.
        reject: Whether malformed rows are left out.
        strict: Whether a difference is an error.
    """
    task = with_workflow(_compare_codes, workflow, unit=unit, work=work, reject=reject)
    why = client.submit(task, pure=False).result()
    if why:
        fall_back("encoding on the GPU", why, "the CPU encodes", strict=strict)
    return not why


def _compare_counts(block: Block, spec: FeatureSpec, reject: bool | int) -> str:
    def on_card() -> Mapping[str, np.ndarray]:
        card = device.worker_card()
        return _arrays(merge_runs(card, [count_block(card, block, spec, reject=reject)]), spec)

    return _difference(on_card, lambda: _arrays(host.count_block(block, spec, reject), spec))


def _arrays(run: Run, spec: FeatureSpec) -> dict[str, np.ndarray]:
    arrays = {"rows": np.array(run.rows), "nulls": run.nulls, "moments": run.moments}
    for name, counts in zip(spec.vocabularies, run.counts, strict=True):
        arrays |= {f"values of {name}": counts.values, f"counts of {name}": counts.counts}
    return arrays


def _compare_codes(
    *, workflow_path: str, digest: str, unit: Unit, work: Path, reject: bool | int
) -> str:
    with tempfile.TemporaryDirectory(dir=work, prefix="compared") as temporary:
        ours, theirs = Path(temporary, "card"), Path(temporary, "host")
        for directory in (ours, theirs):
            (directory / unit.file).parent.mkdir(parents=True)

        def on_card() -> Mapping[str, np.ndarray]:
            card = device.worker_card()
            workflow, on_host = device.load_once(card.device, workflow_path, digest)
            publish(encode_unit(card, unit, workflow, on_host, ours, ours, reject=reject)[1])
            return _columns(ours / unit.file)

        def on_host() -> Mapping[str, np.ndarray]:
            workflow = compiled.load(Path(workflow_path))
            publish(host.encode_block((unit,), workflow, theirs, theirs, reject=reject)[1])
            return _columns(theirs / unit.file)

        return _difference(on_card, on_host)


def _columns(part: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(part)
    return {name: to_numpy(table[name].combine_chunks()) for name in table.column_names}


def _difference(
    on_card: Callable[[], Mapping[str, Any]], on_host: Callable[[], Mapping[str, Any]]
) -> str:
    try:
        expected = on_host()
    except ClickLogError:  # the run will raise it, at the row that comes first
        return ""
    return difference(on_card, expected, _TOLERANCE)
