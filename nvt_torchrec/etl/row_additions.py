"""Labels, negatives and tables that are added to the rows of a block as they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.labels.label_values import LabelValues, open_labels
from nvt_torchrec.etl.negatives.prepare_negatives import open_sampler
from nvt_torchrec.etl.negatives.sampler import NegativeSampler
from nvt_torchrec.etl.tables.prepare_tables import open_stored
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.workflows.stored_tables import StoredTables


@dataclasses.dataclass(frozen=True)
class RowAdditions:
    """The additions to the rows of a run; each attribute is None if the spec does not have it.

    Attributes:
        labels: Adds the labels from other files.
        sampler: Draws negatives.
        tables: The tables that columns are joined from.
    """

    labels: LabelValues | None = None
    sampler: NegativeSampler | None = None
    tables: StoredTables | None = None

    @classmethod
    def open(cls, work: Path, spec: FeatureSpec) -> RowAdditions:
        """Open the additions in the state of a run."""
        return cls(open_labels(work, spec), open_sampler(work, spec), open_stored(work, spec))

    def add_rows(
        self, pieces: Iterator[RawRows], block: Block, spec: FeatureSpec
    ) -> Iterator[RawRows]:
        """Return the rows of a block with their labels, or with their negatives.

        A spec has at most one of both. Tables are joined later, by the caller, to negatives, too.

        Args:
            pieces: The rows, as they were read.
            block: The block.
            spec: The spec by which the rows were read.
        """
        if self.labels:
            pieces = self.labels.add(pieces, block)
        if self.sampler:
            pieces = self.sampler.add_all(pieces, spec)
        return pieces


NO_ADDITIONS = RowAdditions()
