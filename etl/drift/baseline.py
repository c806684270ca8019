"""What a workflow was fitted on, as far as a new day is compared with it.

Exact counts are taken where they are stored: of values in the vocabularies, of missing values,
labels and malformed rows in the manifest. Distributions of dense columns are not stored, nor those
of hashed columns and of single columns that share a vocabulary: they come from a sample of the
training parquet, the same rows every time.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.etl.drift.artifact import read_drift, result_name
from nvt_torchrec.etl.drift.bins import DenseBins
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.spec.feature_spec import FIRST_OOV_ID
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.frequency_buckets import FrequencyBuckets, read_buckets

#: Row groups that are sampled, and rows taken from each: evenly from all training days, and enough
#: that the PSI of a column is expected to be below 0.0001 by the sample alone.
SAMPLED_ROW_GROUPS, SAMPLED_ROWS = 32, 1 << 13

#: A count, and the total that it is out of.
Share = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What a new day is compared with.

    Attributes:
        description: The workflow.
        workflow: Its directory.
        dense: The bins of the dense columns.
        buckets: The buckets of each categorical column.
        stored: The columns whose buckets hold all training rows, not a sample.
        missing: Training rows without a value, of all, by column.
        unseen: Values out of vocabulary, of all, in days that the workflow was not fitted on, by
            categorical column. Hashed columns have none, and nothing is known without such days.
        days: Positive labels and rows of the days that were counted.
        malformed: Malformed rows, of all rows of these days.
    """

    description: WorkflowDescription
    workflow: Path
    dense: DenseBins
    buckets: dict[str, FrequencyBuckets]
    stored: frozenset[str]
    missing: dict[str, Share]
    unseen: dict[str, Share]
    days: dict[int, Share]
    malformed: Share


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
    if manifest["workflow_digest"] is None:
        raise BadInputError(
            f"{root}: imported without a workflow, so new raw rows cannot be compared with it",
            "fit a workflow with `python -m etl run`",
        )
    description = inspect(output.workflow)
    if description.digest != manifest["workflow_digest"]:
        raise SchemaError(
            f"{output.workflow}: not the workflow of {output.manifest} (digest "
            f"{description.digest[:12]}… instead of {manifest['workflow_digest'][:12]}…)",
            "copy the whole output directory again, or run the ETL again",
        )
    spec = description.spec
    counted = read_buckets(output.workflow, description)
    alone = {name for name, columns in spec.vocabularies.items() if len(columns) == 1}
    stored = frozenset(
        column.name
        for column in spec.categorical
        if column.vocabulary_name in counted and column.vocabulary_name in alone
    )
    sampled = [name for name in spec.categorical_names if name not in stored]
    sample = _read_sample(output, manifest, [*spec.dense_names, *sampled])
    dense = [sample[name] for name in spec.dense_names]
    train = manifest["splits"]["train"]
    return Baseline(
        description=description,
        workflow=output.workflow,
        dense=DenseBins.make(np.stack(dense) if dense else np.empty((0, 0), np.float32)),
        buckets={
            column.name: counted[column.vocabulary_name]
            if column.name in stored
            else _sampled_buckets(sample[column.name], description, column.name)
            for column in spec.categorical
        },
        stored=stored,
        missing={name: (train["missing"][name], train["rows"]) for name in spec.feature_names},
        unseen=_unseen(output, manifest, description),
        days={
            int(day): (counts["positives"], counts["rows"])
            for day, counts in sorted(manifest["by_day"].items(), key=lambda item: int(item[0]))
        },
        malformed=(manifest["rows"]["rejected"], manifest["rows"]["in"]),
    )


def _sampled_buckets(
    ids: np.ndarray, description: WorkflowDescription, name: str
) -> FrequencyBuckets:
    column = next(c for c in description.spec.categorical if c.name == name)
    counts = np.bincount(ids, minlength=description.vocabularies[name].table_size)
    # A hashed column has no vocabulary: its ids are buckets, and each of them is known.
    first = FIRST_OOV_ID if column.hash_buckets else column.reserved_ids
    unseen = int(counts[FIRST_OOV_ID:first].sum())
    return FrequencyBuckets.make(np.arange(first, len(counts)), counts[first:], unseen)


def _read_sample(output: EtlOutput, manifest: Manifest, names: list[str]) -> dict[str, np.ndarray]:
    """Read every n-th row of the first row group of some training parts; lists are flattened."""
    parts = _comparable_parts(manifest)
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


def _comparable_parts(manifest: Manifest) -> list[str]:
    """Return the parts with rows that were encoded as the workflow encodes them now.

    Ids and values of older parts differ where an extension updated the statistics or gave ids to
    other values. Training parts are taken if there are any, else those of the newest day.
    """
    since = max(
        (
            extension["generation"]
            for extension in manifest["extensions"]
            if extension["settings"].get("statistics") == "update"
            or extension["settings"].get("retire_after_days")
        ),
        default=0,
    )
    files = [
        part for part in manifest["files"] if part["rows"] and (part["generation"] or 0) >= since
    ]
    train = [part["file"] for part in files if part["file"].startswith("train/")]
    return train or [part["file"] for part in files]


def _unseen(
    output: EtlOutput, manifest: Manifest, description: WorkflowDescription
) -> dict[str, Share]:
    """Return the unseen values of days that the workflow was not fitted on.

    After `etl run` these are validation and test. An extension counts its day, so in its rows fewer
    values are out of vocabulary than in a new day; but when it was compared with the generation
    before, it was new.
    """
    columns = [c for c in description.spec.categorical if not c.hash_buckets]
    if not manifest["generation"] and description.spec.split.by in ("share", "column"):
        return {}  # held-out rows are of the same days, so they have fewer values that are new
    if manifest["generation"]:
        newest = max(map(int, manifest["by_day"]))
        (path,) = (file["path"] for file in manifest["inputs"] if file["day"] == newest)
        file = output.drift / f"{result_name(path)}.json"
        before = read_drift(file) if file.is_file() else None
        if before is None or before.workflow_digest != description.parent:
            return {}
        return {
            c.name: (measured.unseen.count, measured.unseen.total)
            for c in columns
            if (measured := before.column(c.name)) is not None and measured.unseen is not None
        }
    held_out = [manifest["splits"][split] for split in ("valid", "test")]
    lists = [c.name for c in columns if c.multi_hot]
    ids = _count_ids(output, manifest, lists)
    return {
        c.name: (
            sum(split["out_of_vocabulary"][c.name] for split in held_out),
            ids[c.name]
            if c.multi_hot
            else sum(split["rows"] - split["missing"][c.name] for split in held_out),
        )
        for c in columns
    }


def _count_ids(output: EtlOutput, manifest: Manifest, names: list[str]) -> dict[str, int]:
    """Count the ids of columns of lists in valid and test, from the footers."""
    splits = manifest["splits"]
    # Footers count an empty list as a value.
    totals = {
        name: -sum(splits[split]["missing"][name] for split in ("valid", "test")) for name in names
    }
    files = [p["file"] for p in manifest["files"] if not p["file"].startswith("train/")]
    for file in files if names else ():
        footer = pq.read_metadata(output.splits / file)
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                name = chunk.path_in_schema.split(".")[0]
                if name in totals:
                    totals[name] += chunk.num_values
    return totals
