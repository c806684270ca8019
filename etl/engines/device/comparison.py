"""The first block of a run on a card, counted and encoded by the host as well, and compared."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.device import difference
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.files.atomic import publish
from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines import block as host
from nvt_torchrec.etl.engines.device import workers as device
from nvt_torchrec.etl.engines.device.blocks import count_block, encode_unit, merge_runs
from nvt_torchrec.etl.engines.job import Job
from nvt_torchrec.etl.engines.runs import Run
from nvt_torchrec.etl.output import PARTS
from nvt_torchrec.etl.plan import Unit
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.workflows import compiled

#: By how much dense values may differ, as a share of their magnitude.
_TOLERANCE = 1e-6


def compare_counts(job: Job, block: Block) -> str:
    """Count a block on the card and on the host; return what differs, "" for nothing."""

    def on_card() -> Mapping[str, np.ndarray]:
        card = device.worker_card()
        counted = count_block(card, block, job.spec, reject=job.reject)
        return _arrays(merge_runs(card, [counted]), job.spec)

    return _difference(
        on_card, lambda: _arrays(host.count_block(block, job.spec, job.reject), job.spec)
    )


def _arrays(run: Run, spec: FeatureSpec) -> dict[str, np.ndarray]:
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

        def on_card() -> Mapping[str, np.ndarray]:
            card = device.worker_card()
            there, here = device.load_once(card.device, *workflow)
            publish(encode_unit(card, unit, there, here, ours, reject=job.reject)[1])
            return _columns(ours / PARTS / unit.file)

        def on_host() -> Mapping[str, np.ndarray]:
            loaded = compiled.load(Path(workflow[0]))
            publish(host.encode_block((unit,), loaded, theirs, reject=job.reject)[1])
            return _columns(theirs / PARTS / unit.file)

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


#: What a card does → the task that compares it with the host.
TASKS = {"counting": compare_counts, "encoding": compare_codes}
