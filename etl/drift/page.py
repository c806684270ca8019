"""The page of a comparison, ``day_N.html``, in the style of the ETL's report."""

from __future__ import annotations

import itertools
from pathlib import Path

from nvt_torchrec.base.pages.render import render
from nvt_torchrec.etl.drift.artifact import ColumnDrift, Drift
from nvt_torchrec.etl.drift.table import psi_limit
from nvt_torchrec.workflows.frequency_buckets import BUCKETS, LEAST_COUNT

#: Columns without a flag that are shown with their distributions, those with the highest PSI.
UNFLAGGED = 12


def page(drift: Drift) -> str:
    """Make the page as HTML; it loads nothing from elsewhere."""
    flagged = [column for column in drift.columns if column.flags]
    others = [column for column in drift.columns if not column.flags]
    others.sort(key=lambda column: -column.psi.psi)
    return render(
        Path(__file__).with_name("drift.html"),
        drift=drift,
        flagged=flagged,
        others=others[:UNFLAGGED],
        highest=max([column.psi.psi for column in drift.columns] + [1e-9]),
        limit_of=psi_limit,
        shares_of=_shares,
        bucket_names=_bucket_names,
        buckets=BUCKETS,
        least_count=LEAST_COUNT,
    )


def _shares(column: ColumnDrift) -> tuple[list[float], list[float]]:
    """Return the shares of the buckets then and now."""
    then, now = column.psi.then, column.psi.now
    return [n / max(1, sum(then)) for n in then], [n / max(1, sum(now)) for n in now]


def _bucket_names(column: ColumnDrift) -> list[str]:
    if column.kind == "dense":
        return [f"bin {i + 1} of {len(column.psi.then)}" for i in range(len(column.psi.then))]
    cuts = itertools.pairwise(range(0, 101, 100 // BUCKETS))
    return [f"most frequent {a} to {b} %" for a, b in cuts] + ["rare and unseen values"]
