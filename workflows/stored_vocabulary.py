"""Read a vocabulary of a saved workflow."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.vocabulary import FittedVocabulary


def read_vocabulary(
    workflow: Path, description: WorkflowDescription, column: CategoricalColumn
) -> FittedVocabulary:
    """Read the vocabulary of a column of a saved workflow, with its counts.

    Raises:
        BadInputError: its file is damaged.
    """
    described = description.vocabularies[column.name]
    file, text = workflow / described.file, RAW_TYPES[column.raw].is_text
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            table = opened.read()
        values, counts = (own.combine_chunks() for own in table.columns)
        kinds = [pa.string() if text else pa.int64(), pa.int64()]
        if [values.type, counts.type] != kinds or values.null_count or counts.null_count:
            raise ValueError("its columns are not values and counts without nulls")
        if len(values) != described.values:
            raise ValueError(f"{len(values)} values instead of {described.values}")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadInputError(
            f"{file}: damaged: {error}", "copy the whole workflow directory again"
        ) from error
    return FittedVocabulary(
        values if text else to_numpy(values), to_numpy(counts), dict(described.observed)
    )
