"""What was counted in the days that a workflow was fitted on.

Exact counts are taken where they are stored: of values in the vocabularies, of missing values,
labels and malformed rows in the manifest. Distributions of dense columns are not stored, nor those
of hashed columns and of single columns that share a vocabulary: they come from a sample of the
training parquet, the same rows every time.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.etl.report.data import count_ids
from nvt_torchrec.formats.day_names import name_of
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.spec.feature_spec import FIRST_OOV_ID, CategoricalColumn
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.drift import Counted, Drift, Share, compared
from nvt_torchrec.workflows.drift_cells import Buckets, count_bins, make_edges, read_buckets

#: Row groups that are sampled, and rows taken from each: evenly from all training days, and enough
#: that the PSI of a column is expected to be below 0.0001 by the sample alone.
SAMPLED_ROW_GROUPS, SAMPLED_ROWS = 32, 1 << 13


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What a new day is compared with.

    Attributes:
        description: The workflow.
        workflow: Its directory.
        edges: The bins of the dense columns, see :func:`workflows.drift_cells.make_edges`.
        buckets: The buckets of each categorical column.
        days: The days that were counted.
        counted: What was counted in them.
    """

    description: WorkflowDescription
    workflow: Path
    edges: np.ndarray
    buckets: dict[str, Buckets]
    days: list[int]
    counted: Counted


def read_baseline(root: Path) -> Baseline:
    """Read the baseline of a finished output.

    Raises:
        BadInputError: There is no finished output with a workflow, or a file is damaged.
        SchemaError: The workflow is another one than that of the manifest, or of another version.
    """
    output = EtlOutput(root)
    if not output.manifest.is_file():
        raise BadInputError(
            f"{root}: no {output.manifest.name}, so it is not the output of a finished run",
            "pass the --output_path of `python -m etl run`; finish a run with --resume",
        )
    manifest = Manifest.read(output.manifest)
    if manifest.workflow_digest is None:
        raise BadInputError(
            f"{root}: imported without a workflow, so new raw rows cannot be compared with it",
            "fit a workflow with `python -m etl run`",
        )
    description = inspect(output.workflow)
    if description.digest != manifest.workflow_digest:
        raise SchemaError(
            f"{output.workflow}: not the workflow of {output.manifest} (digest "
            f"{description.digest[:12]}… instead of {manifest.workflow_digest[:12]}…)",
            "copy the whole output directory again, or run the ETL again",
        )
    spec, names = description.spec, compared(description.spec)
    vocabularies = read_buckets(output.workflow, description)
    buckets = {
        column.name: vocabularies[column.vocabulary_name]
        for column in spec.categorical
        if not column.hash_buckets and len(spec.vocabularies[column.vocabulary_name]) == 1
    }
    sampled = [column for column in spec.categorical if column.name not in buckets]
    columns = [*spec.dense_names, *(column.name for column in sampled)]
    sample = _read_sample(output, manifest, columns)
    buckets |= {c.name: _sampled_buckets(sample[c.name], description, c) for c in sampled}
    dense = [sample[name] for name in spec.dense_names]
    values = np.stack(dense) if dense else np.empty((0, 0), np.float32)
    edges = make_edges(values)
    bins = dict(zip(spec.dense_names, count_bins(values, edges), strict=True))
    train, days = manifest.splits["train"], sorted(map(int, manifest.by_day))
    by_day = [manifest.by_day[str(day)] for day in days]
    rows = manifest.rows
    return Baseline(
        description=description,
        workflow=output.workflow,
        edges=edges,
        buckets=buckets,
        days=days,
        counted=Counted(
            cells={
                name: bins[name] if name in bins else buckets[name].counts
                for name in spec.feature_names
                if name in names
            },
            missing={name: (train["missing"][name], train["rows"]) for name in names},
            unseen=_unseen(output, manifest, description),
            days=[(counts["positives"], counts["rows"]) for counts in by_day],
            malformed=(rows["rejected"], rows["in"]),
            whole=manifest.settings.get("limit_rows") is None,
        ),
    )


def _sampled_buckets(
    ids: np.ndarray, description: WorkflowDescription, column: CategoricalColumn
) -> Buckets:
    counts = np.bincount(ids, minlength=description.vocabularies[column.name].table_size)
    # A hashed column has no vocabulary: its ids are buckets, and each of them is known.
    first = FIRST_OOV_ID if column.hash_buckets else column.reserved_ids
    return Buckets.make([counts[first:]], first, int(counts[FIRST_OOV_ID:first].sum()))


def _read_sample(output: EtlOutput, manifest: Manifest, names: list[str]) -> dict[str, np.ndarray]:
    """Read every n-th row of the first row group of some training parts; lists are flattened."""
    parts = comparable_parts(manifest)
    count = min(SAMPLED_ROW_GROUPS, len(parts))
    samples: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for i in range(count if names else 0):
        file = output.splits / parts[i * len(parts) // count]
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
                group = parquet.read_row_group(0, columns=names, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise BadInputError(
                f"{file}: cannot be read: {error}", "copy the output again, or run the ETL again"
            ) from error
        step = -(-group.num_rows // SAMPLED_ROWS)
        for name in names:
            column = group[name].combine_chunks()
            if pa.types.is_list(column.type):
                samples[name].append(to_numpy(column.flatten()))
            else:
                samples[name].append(to_numpy(column)[::step])
    return {name: np.concatenate(arrays) for name, arrays in samples.items()}


def comparable_parts(manifest: Manifest) -> list[str]:
    """Return the parts with rows that were encoded as the workflow encodes them now.

    Ids and values of older parts differ where an extension updated the statistics or gave ids to
    other values. Training parts are taken if there are any, else those of the newest day.
    """
    since = max(
        (
            extension.generation
            for extension in manifest.extensions
            if extension.settings.get("statistics") == "update"
            or extension.settings.get("retire_after_days")
        ),
        default=0,
    )
    files = [part for part in manifest.files if part.rows and (part.generation or 0) >= since]
    train = [part.file for part in files if part.split == "train"]
    return train or [part.file for part in files]


def _unseen(
    output: EtlOutput, manifest: Manifest, description: WorkflowDescription
) -> dict[str, Share]:
    """Return the unseen values of days that the workflow was not fitted on.

    After `etl run` these are validation and test. An extension counts its day, so in its rows fewer
    values are out of vocabulary than in a new day; but when it was compared with the generation
    before, it was new.
    """
    spec = description.spec
    columns = [c for c in spec.categorical if not c.hash_buckets and c.name in compared(spec)]
    if manifest.generation:
        newest = max(map(int, manifest.by_day))
        (path,) = (file.path for file in manifest.inputs if file.day == newest)
        try:
            before = Drift.read(output.drift / f"{result_name(path)}.json")
        except SchemaError:  # of an earlier version of this program
            return {}
        except BadInputError:
            if (output.drift / f"{result_name(path)}.json").exists():
                raise
            return {}
        if before.workflow_digest != description.parent:
            return {}
        measures = {column.name: before.measure("unseen share", column.name) for column in columns}
        return {name: (m.now[0], m.now[1]) for name, m in measures.items() if m is not None}
    if spec.split.by in ("share", "column"):
        return {}  # held-out rows are of the same days, so they have fewer values that are new
    held_out = [manifest.splits[split] for split in ("valid", "test")]
    lists = count_ids(output.splits, manifest, [c.name for c in columns if c.multi_hot])
    present = {
        c.name: lists[c.name]["valid"] + lists[c.name]["test"]
        if c.multi_hot
        else sum(split["rows"] - split["missing"][c.name] for split in held_out)
        for c in columns
    }
    return {
        c.name: (sum(split["out_of_vocabulary"][c.name] for split in held_out), present[c.name])
        for c in columns
    }


def result_name(path: str) -> str:
    """Return the name of the result for a raw file.

    It is ``day_24``, the date of a dated file, the name up to its number, or that of another file.
    """
    name = re.split(r"[/\\]", path)[-1]
    day_name = name_of(path)
    if day_name is None:
        return name.split(".")[0] or "day"
    return name.split(".")[0] if day_name.kind == "day" else day_name.other(day_name.number)
