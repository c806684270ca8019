"""Metrics over ranks, by what an evaluation does with its rows; imports little, starts soon."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from nvt_torchrec.dlrm.launch.distributed import gather_rows, process_group
from nvt_torchrec.dlrm.metrics import compute_metrics

#: Rows of each rank.
ROWS = (0, 1, 5000, 777)


def rows_of(rank: int) -> np.ndarray:
    """Logits and labels, float32 [n, 2]; many logits are equal."""
    rng = np.random.default_rng(rank)
    logits = rng.normal(-1, 2, ROWS[rank]).round(1).astype(np.float32)
    labels = rng.random(len(logits)) < 1 / (1 + np.exp(-logits))
    return np.stack([logits, labels.astype(np.float32)], axis=1)


def main(path: Path) -> None:
    """Write rank 0's metrics. No global names the group, or it would outlive the interpreter."""
    with process_group() as group:
        everything = gather_rows(group, rows_of(group.rank))
        if group.rank == 0:
            path.write_text(json.dumps(compute_metrics(*everything.T).to_dict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
