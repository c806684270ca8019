"""Read the positive rows: the items of each user, and how often each item occurs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.clicklog.text.assemble import join_hashes
from nvt_torchrec.etl.negatives.candidates import ItemRows, select_item_columns
from nvt_torchrec.etl.units.counting import Counts, count, merge
from nvt_torchrec.etl.units.unit_plan import DividedBlock
from nvt_torchrec.etl.units.writing import choose_splits
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.formats.splits import SPLITS

#: Bytes of text that are parsed at once.
_CHUNK_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Positives:
    """The rows with label 1 of one or more blocks.

    Attributes:
        rows: Number of rows that were read, with any label.
        pairs: The distinct joined hashes of user and item, ascending, and the number of rows of
            each. Rows without a user or an item are left out.
        trained: The hashes of the items in training rows, and the number of rows of each.
        items: All items, in rows with any label.
    """

    rows: int
    pairs: Counts
    trained: Counts
    items: ItemRows

    @classmethod
    def read(cls, block: Block, spec: FeatureSpec, *, train: bool, max_bad_rows: int) -> Positives:
        """Read the rows of a block.

        Args:
            block: The block.
            spec: The columns.
            train: Whether its rows are for training; ignored for a :class:`DividedBlock`, which has
                rows of several splits.
            max_bad_rows: The maximum number of malformed rows that are left out; 0: a malformed row
                is an error.

        Raises:
            BadRowError: A row is malformed.
            BadInputError: The block cannot be read.
        """
        names = [column.name for column in select_item_columns(spec, "")]
        num_rows = 0
        num_lines = 0
        pairs: list[np.ndarray] = [np.empty(0, np.int64)]
        trained: list[np.ndarray] = [np.empty(0, np.int64)]
        items: list[ItemRows] = []
        pieces = read_block_chunks(block, spec, max_bad_rows=max_bad_rows, chunk_bytes=_CHUNK_BYTES)
        for rows in pieces:
            assert rows.negative_keys is not None
            keys, users = rows.negative_keys
            is_positive = (rows.labels[0] == 1) & (keys != 0)
            has_user = is_positive & (users != 0)
            pairs.append(join_hashes(users[has_user], keys[has_user]))
            is_trained = _find_trained(rows, block, num_lines, train=train)
            trained.append(keys[is_positive & is_trained])
            items.append(ItemRows.from_rows(rows, spec, names, keys).keep_oldest())
            num_rows += len(rows)
            num_lines += rows.lines
        return cls(num_rows, count(pairs), count(trained), _join_items(items))

    @classmethod
    def merge(cls, several: Iterable[Positives]) -> Positives:
        """Join the results of all blocks, at least one."""
        parts = [*several]
        return cls(
            sum(part.rows for part in parts),
            merge(part.pairs for part in parts),
            merge(part.trained for part in parts),
            _join_items([part.items for part in parts]),
        )


def _find_trained(rows: RawRows, block: Block, lines_before: int, *, train: bool) -> np.ndarray:
    """Return the mask of training rows of a block, bool [n]."""
    if isinstance(block, DividedBlock):
        return choose_splits(rows, block, lines_before) == SPLITS.index("train")
    return np.full(len(rows), train)


def _join_items(parts: list[ItemRows]) -> ItemRows:
    return ItemRows.concatenate(parts).keep_oldest()


def look_up_counts(counts: Counts, keys: np.ndarray) -> np.ndarray:
    """Return the count of each key, int64 [n]; 0 for a key that was not counted."""
    if not len(counts):
        return np.zeros(len(keys), np.int64)
    values = np.asarray(counts.values)
    index = np.minimum(np.searchsorted(values, keys), len(values) - 1)
    return np.where(values[index] == keys, counts.counts[index], 0)
