"""Outputs of the ETL of two generations, with the same rows: what a continued run starts from.

The columns are one of each kind: a vocabulary of its own, one that two columns share, hashed
values, and out-of-vocabulary values that are spread over several ids.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.hashing import murmur3_int
from nvt_torchrec.base.parquet.footer import compute_footer_digest
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.manifest import PartFile
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.vocabularies import Generation, VocabularyCounts, describe_vocabularies
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from tests.manifests import write_manifest
from tests.nvt_loader.data import WRITER, make_columns, without_nulls, write_metadata

SPEC = FeatureSpec(
    label="label",
    dense=tuple(DenseColumn(f"int_{i}") for i in range(2)),
    categorical=(
        CategoricalColumn("cat_0", raw="int"),
        CategoricalColumn("cat_1", raw="int", vocabulary="shared"),
        CategoricalColumn("cat_2", raw="int", vocabulary="shared"),
        CategoricalColumn("cat_3", raw="int", hash_buckets=20),
        CategoricalColumn("cat_4", raw="int", max_table_size=500, num_buckets=4),
    ),
)
#: By generation, the number of values of each vocabulary.
VALUES = (
    {"cat_0": 30, "shared": 50, "cat_3": 0, "cat_4": 20},
    {"cat_0": 31, "shared": 50, "cat_3": 0, "cat_4": 27},
    {"cat_0": 40, "shared": 64, "cat_3": 0, "cat_4": 33},
)
DIGESTS = tuple(hashlib.sha256(bytes([number])).hexdigest() for number in range(3))
#: Rows of each part: split → day → rows.
PARTS = {"train": {0: [300, 40], 1: [260], 2: [200, 129]}, "valid": {3: [120]}, "test": {3: [201]}}


def table_sizes(generation: int) -> tuple[int, ...]:
    values = VALUES[generation]
    return tuple(
        column.reserved_ids + values[column.vocabulary_name] for column in SPEC.categorical
    )


def values_of(vocabulary: str) -> np.ndarray:
    """The values of the newest generation, by place in the vocabulary."""
    return np.arange(VALUES[-1][vocabulary], dtype=np.int64) * 7919 + 13


def sources(column: CategoricalColumn, then: int) -> np.ndarray:
    """By id of the newest generation, the id of its value in generation ``then``: int64."""
    vocabulary = column.vocabulary_name
    size = column.reserved_ids + VALUES[-1][vocabulary]
    origins = np.arange(size)
    for i in range(column.reserved_ids, size):
        if i >= column.reserved_ids + VALUES[then][vocabulary]:
            value = values_of(vocabulary)[i - column.reserved_ids : i - column.reserved_ids + 1]
            origins[i] = 2 + int(murmur3_int(value)[0]) % column.oov_ids
    return origins


def write_output(root: Path, generation: int, *, shuffle: str = "none") -> Path:
    """Write an output of the ETL whose workflow is of a generation; return its splits."""
    output = EtlOutput(root)
    names = tuple(SPEC.categorical_names)
    vocabularies = tuple(column.vocabulary_name for column in SPEC.categorical)
    columns = "label", tuple(SPEC.dense_names), names, table_sizes(generation)
    schema = TableSchema(*columns, vocabularies=vocabularies)
    newest = table_sizes(len(VALUES) - 1)
    files, first_row = [], 0
    for split in SPLITS:
        (output.splits / split).mkdir(parents=True)
        numbered = [(day, rows) for day, all_rows in PARTS[split].items() for rows in all_rows]
        for number, (day, rows) in enumerate(numbered):
            columns = make_columns(first_row, rows, table_sizes=newest, dense=2, seed=3)
            if generation < len(VALUES) - 1:
                for column in SPEC.categorical:
                    ids = sources(column, generation)[columns[column.name]]
                    columns[column.name] = ids.astype(np.int32)
            path = output.splits / split / f"part.{number}.parquet"
            pq.write_table(without_nulls(columns), path, row_group_size=64, **WRITER)
            size, footer = path.stat().st_size, compute_footer_digest(path)
            files.append(PartFile(f"{split}/{path.name}", rows, size, day, max(0, day - 1), footer))
            first_row += rows
        schema.write(output.splits / split)
    schema.write(output.splits)
    write_metadata(output.splits)
    write_workflow(output.workflow, generation)
    write_manifest(
        output.manifest,
        generation=generation,
        settings={"shuffle": shuffle},
        days={split: sorted(PARTS[split]) for split in SPLITS},
        splits={
            split: {"rows": sum(part.rows for part in files if part.split == split)}
            for split in SPLITS
        },
        files=files,
    )
    return output.splits


def write_workflow(path: Path, generation: int) -> None:
    """Write what a run reads of a workflow: ``metadata.json`` and the files that it names."""
    files = {}
    directory = "artifacts/node_3/categories"

    def write(name: str, table: pa.Table) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path / name)
        files[name] = FileEntry.from_file(path / name)

    for name, count in VALUES[generation].items():
        table = pa.table({name: values_of(name)[:count], f"{name}_size": np.ones(count, np.int64)})
        write(f"{directory}/unique.{name}.parquet", table)
        files[f"{directory}/meta.{name}.parquet"] = FileEntry(0, sha256="")
    files["graph.json"] = FileEntry(0, sha256="")
    lineage = tuple(
        Generation(
            number,
            DIGESTS[number],
            (number + 2,) if number else (0, 1, 2),
            VALUES[number],
        )
        for number in range(generation + 1)
    )
    observed = dict.fromkeys(("null", "oov", "unique"), 0)
    counted = {
        name: VocabularyCounts(count, observed) for name, count in VALUES[generation].items()
    }
    vocabularies = describe_vocabularies(SPEC, counted, dict.fromkeys(counted, directory))
    statistics = {name: {"mean": 0.0, "std": 1.0} for name in SPEC.normalized_names}
    WorkflowDescription(
        path, SPEC, statistics, vocabularies, {}, DIGESTS[generation], files, lineage
    ).write()
