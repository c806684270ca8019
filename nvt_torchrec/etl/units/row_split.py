"""Division of the rows of a block into the splits, by a rule that looks at each row alone.

So the division depends neither on the engine nor on how the log is cut into blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from nvt_torchrec.base.hashing import mix, round_keys
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.clicklog.text.assemble import take
from nvt_torchrec.etl.division.plan import DividedBlock
from nvt_torchrec.etl.units.results import LostRowsError
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.formats.splits import SPLITS


def hashes(values: np.ndarray, *seed: int) -> np.ndarray:
    """Hash int64 [n] with a seed of non-negative integers; uint64 [n]."""
    return _hashes(np.ascontiguousarray(values), *round_keys(*seed)[:2])


@compiled()
def _hashes(values, first, second):
    hashes = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        hashes[i] = mix(mix(np.uint64(values[i]) ^ first) + second)
    return hashes


def choose(rows: RawRows, block: DividedBlock, lines_before: int) -> np.ndarray:
    """Return the index of each row's split in ``block.rule.splits``; uint8 [n].

    Args:
        rows: Rows of the block.
        block: The block.
        lines_before: The number of the block's lines before those of ``rows``.
    """
    rule = block.rule
    if rule.by == "share":
        return rule.choose(
            hashes(block.first_row + lines_before + rows.line, rule.seed, block.file)
        )
    return rule.choose(rows.key if rule.by == "time" else hashes(rows.key, rule.seed))  # type: ignore[arg-type]


def divide_rows(
    pieces: Iterable[RawRows], block: Block, splits: Sequence[str]
) -> Iterator[tuple[RawRows, ...]]:
    """Divide rows of a block into those of each split.

    Bad rows go to the first split of the block, so that each is rejected once. ``lines`` of all
    results is that of the piece.

    Args:
        pieces: All rows of the block, in their order.
        block: The block; if it is not divided, there is one split.
        splits: The splits to yield, of those of the block.

    Raises:
        LostRowsError: The reader lost rows.
    """
    lines = 0
    for rows in pieces:
        if rows.lines != len(rows) + rows.bad_count:
            raise LostRowsError(
                f"{block.source}, bytes {block.begin} to {block.end}: {rows.lines} "
                f"lines, but {len(rows)} rows and {rows.bad_count} rejected ones",
                "this is a defect; nothing was written for them",
            )
        if not isinstance(block, DividedBlock):
            yield (rows,)
            continue
        chosen = choose(rows, block, lines)
        by_split = []
        for split in splits:
            taken = take(rows, chosen == SPLITS.index(split))
            if split == block.rule.splits[0]:
                taken = dataclasses.replace(taken, bad=rows.bad, bad_count=rows.bad_count)
            by_split.append(taken)
        yield tuple(by_split)
        lines += rows.lines
