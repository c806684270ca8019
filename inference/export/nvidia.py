"""``feature_spec.yaml``, and rows, as the DLRM of NVIDIA's DeepLearningExamples reads them.

After its ``dlrm/data/feature_spec.py`` and ``datasets.py``: a mapping (``train``, ``test``) is a
directory with ``label.bin`` (bool), ``numerical.bin`` (float16, row by row) and a file for each
categorical column (the smallest of int8, int16 and int32 that holds its cardinality). Features are
those of the workflow: dense ones are transformed; ids are 0 for padding, 1 for a missing value and
2 for out of vocabulary. The cardinality is the number of rows of the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import IO

import numpy as np
import yaml
from tqdm import tqdm

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.clicklog.readers.stream import stream_unparsed
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.inference.predictor import Predictor, input_spec
from nvt_torchrec.workflows.compiled.workflow import EncodedRows

log = logging.getLogger(__name__)

SPEC_FILE = "feature_spec.yaml"
MAPPINGS = ("train", "test")
_BLOCK_BYTES = 4 << 20


def export_nvidia(
    bundle: Path, output: Path, logs: dict[str, str], file_format: str | None = None
) -> dict[str, int]:
    """Write ``feature_spec.yaml`` and the encoded rows into a new directory.

    Args:
        bundle: Directory of a bundle.
        output: Directory to make.
        logs: Raw log with labels for each mapping. A mapping without one is described only, and
            its files are not written.
        file_format: Format of the logs: tsv, csv or parquet; None for the training log's format, or
            parquet if the file name ends so.

    Returns:
        The number of rows written for each mapping.

    Raises:
        SettingsError: A column holds lists, or a value is too large for float16.
        SchemaError: A log has no labels.
        BadInputError, BadRowError: A log is missing or malformed.
        OutputError: ``output`` exists or cannot be written.
    """
    predictor = Predictor.load(bundle, check=True)
    schema = dataclasses.replace(predictor.workflow.schema, label=predictor.label)
    if schema.weight:
        log.warning("NVIDIA's format has no weights: %s is left out", schema.weight)
    if schema.multi_hot:
        raise SettingsError(
            f"lists in column {', '.join(schema.multi_hot)}",
            "NVIDIA's DLRM reads one id a row; train without lists, or export to another format",
        )
    rows = {}
    with new_directory(output) as temporary:
        for mapping in MAPPINGS:
            (temporary / mapping).mkdir()
            if mapping in logs:
                rows[mapping] = _write(predictor, logs[mapping], file_format, temporary / mapping)
        text = yaml.safe_dump(feature_spec(schema), sort_keys=False)
        (temporary / SPEC_FILE).write_text(text)
    return rows


def feature_spec(schema: TableSchema) -> dict:
    """Return the content of ``feature_spec.yaml``."""
    features: dict[str, dict] = {
        name: {"dtype": id_dtype(rows).name, "cardinality": rows}
        for name, rows in zip(schema.categorical, schema.table_sizes, strict=True)
    }
    features |= {name: {"dtype": "float16"} for name in schema.dense}
    features[schema.label] = {"dtype": "bool"}
    return {
        "feature_spec": features,
        "source_spec": {mapping: _chunks(schema, mapping) for mapping in MAPPINGS},
        "channel_spec": {
            "categorical": list(schema.categorical),
            "numerical": list(schema.dense),
            "label": [schema.label],
        },
        "metadata": {},
    }


def _chunks(schema: TableSchema, mapping: str) -> list[dict]:
    files = {"numerical.bin": list(schema.dense), "label.bin": [schema.label]}
    files |= {_file(name): [name] for name in schema.categorical}
    return [
        {"type": "split_binary", "features": features, "files": [f"{mapping}/{file}"]}
        for file, features in files.items()
        if features
    ]


def _file(column: str) -> str:
    return f"{column}.id.bin"  # differs from numerical.bin and label.bin


def id_dtype(cardinality: int) -> np.dtype:
    """Return the smallest type whose largest value exceeds the cardinality, as NVIDIA's loader."""
    types = (np.dtype(kind) for kind in (np.int8, np.int16, np.int32))
    return next(kind for kind in types if cardinality < np.iinfo(kind).max)


def _write(predictor: Predictor, path: str, file_format: str | None, directory: Path) -> int:
    spec = input_spec(predictor.spec, path, file_format)
    schema = predictor.workflow.schema
    rows = 0
    with contextlib.ExitStack() as stack, tqdm(unit="rows", unit_scale=True, disable=None) as bar:

        def create(name: str) -> IO[bytes]:
            return stack.enter_context(open(directory / name, "wb"))

        label = create("label.bin")
        numerical = create("numerical.bin") if schema.dense else None
        ids = [create(_file(name)) for name in schema.categorical]
        for piece in stream_unparsed(path, spec, block_bytes=_BLOCK_BYTES):
            if not piece.label:
                raise SchemaError(f"{path}: no column {spec.label}", "pass rows with labels")
            parsed = piece.parse()
            encoded = predictor.workflow.transform(parsed)
            label.write(predictor.labels_of(parsed).astype(bool).tobytes())
            if numerical:
                numerical.write(_halves(encoded, schema).tobytes())
            for file, column, size in zip(ids, encoded.ids, schema.table_sizes, strict=True):
                file.write(column.astype(id_dtype(size)).tobytes())
            rows += len(encoded)
            bar.update(len(encoded))
    if not rows:
        raise BadInputError(f"{path}: there are no rows", "pass rows with labels")
    return rows


def _halves(encoded: EncodedRows, schema: TableSchema) -> np.ndarray:
    """Dense features float16 [n, columns]."""
    with np.errstate(over="ignore"):
        halves = encoded.dense.T.astype(np.float16)
    large = np.argwhere(~np.isfinite(halves))
    if len(large):
        row, column = large[0]
        raise SettingsError(
            f"column {schema.dense[column]}: {encoded.dense[column, row]} is too large for "
            "float16, the type of NVIDIA's numerical.bin",
            "fit the workflow with --dense log_normalize",
        )
    return np.ascontiguousarray(halves)
