"""Which row of a checkpoint's table each row of a larger table starts as.

An id keeps its value from one generation of a workflow to the next, so its row stays. A value that
has got an id since was encoded as out of vocabulary before: its row starts as a copy of that row,
so that the model predicts for it what it predicted before.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID
from nvt_torchrec.formats.vocabularies import Generation
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class GrownTable:
    """How the rows of a table follow from those of a checkpoint's.

    Attributes:
        rows_then: The rows of the checkpoint's table.
        rows: The rows of the table.
        kept: The first so many rows of the checkpoint's table stay; those behind start anew.
        origins: For each row from ``kept`` on that a value has, the row of the checkpoint's table
            that it starts as: int64. Later rows start as the first row of out of vocabulary.
        oov_ids: The number of rows of out of vocabulary.
    """

    rows_then: int
    rows: int
    kept: int
    origins: np.ndarray
    oov_ids: int = 1

    def anew(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the rows [begin, end) start anew, and as which row of the checkpoint."""
        rows = np.arange(max(begin, self.kept), max(end, self.kept))
        padded = np.append(self.origins, FIRST_OOV_ID)
        return rows, padded[np.minimum(rows - self.kept, len(self.origins))]


def grow_tables(
    then: ModelConfig, now: ModelConfig, generation: Generation, workflow: WorkflowDescription
) -> dict[str, GrownTable]:
    """Return how each table follows from that of a checkpoint, by the name of the table.

    Args:
        then: The model of the checkpoint.
        now: The model of the run, which differs in the sizes of tables only.
        generation: The generation of the checkpoint's data.
        workflow: The workflow of the run's data, of a later generation or the same one.

    Raises:
        SchemaError: The columns are not those of the workflow.
        BadInputError: A file of the workflow is damaged.
    """
    columns = {column.name: column for column in workflow.spec.categorical}
    tables = {}
    for (name, table), rows_then, rows in zip(
        now.table_of.items(), then.num_embeddings, now.num_embeddings, strict=True
    ):
        if name not in columns:
            raise SchemaError(
                f"{workflow.path}: no categorical column {name}, which the data have",
                "restore the workflow that made the data",
            )
        column = columns[name]
        vocabulary = column.vocabulary_name
        values = generation.values[vocabulary], workflow.lineage[-1].values[vocabulary]
        kept, needed = (column.reserved_ids + count for count in values)
        origins = workflow.oov_ids(column, np.arange(kept, needed))
        tables[table] = GrownTable(rows_then, rows, kept, origins, column.oov_ids)
    return tables
