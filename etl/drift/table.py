"""The result of a comparison as a table for the terminal."""

from __future__ import annotations

from nvt_torchrec.base.pages.formats import percent
from nvt_torchrec.etl.drift.artifact import ColumnDrift, Drift, Mover, ShareDrift


def table(drift: Drift, *, all_columns: bool = False) -> str:
    """Return what drifted, with details, a line on the rest, and how many measures are flagged.

    Args:
        drift: The comparison.
        all_columns: Whether columns without drift have a line each as well.
    """
    shown = [column for column in drift.columns if all_columns or column.flags]
    lines = [f"{drift.input}: {drift.rows:,} rows, compared with {_days(drift.baseline_days)}"]
    for name, measure in (("label rate", drift.label_rate), ("malformed rows", drift.malformed)):
        if measure is not None:
            lines.append(f"  {name:15} {changed(measure)}{'  << drift' * measure.flagged}")
    if shown:
        width = max(len("column"), *(len(column.name) for column in shown))
        lines += [
            "",
            f"  {'column':{width}} {'PSI':>7} {'limit':>7}  {'missing':>19}  {'unseen':>19}",
        ]
        for column in shown:
            lines.append(_line(column, width))
            if column.flags:
                lines += [f"      {line}" for line in details(column)]
        lines.append("")
    rest = [column for column in drift.columns if not column.flags]
    if rest and not all_columns:
        lines.append(f"  {_summary(rest)}")
    lines.append(_verdict(drift))
    return "\n".join(lines)


def _summary(columns: list[ColumnDrift]) -> str:
    """Return a line on columns without drift."""
    highest = max(columns, key=lambda column: column.psi.psi)
    count = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
    limit = psi_limit(highest)
    limited = "no limit" if limit is None else f"limit {limit:.4f}"
    return f"{count} without drift; highest PSI {highest.psi.psi:.4f} of {highest.name} ({limited})"


def _days(days: list[int]) -> str:
    if not days:
        return "no day"
    return f"day {days[0]}" if len(days) == 1 else f"days {days[0]} to {days[-1]}"


def _line(column: ColumnDrift, width: int) -> str:
    limit = psi_limit(column)
    cells = (
        f"{column.name:{width}}",
        f"{column.psi.psi:7.4f}",
        "      -" if limit is None else f"{limit:7.4f}",
        f" {changed(column.missing):>19}",
        f" {'-' if column.unseen is None else changed(column.unseen):>19}",
    )
    flags = f"  << {', '.join(column.flags)}" if column.flags else ""
    return f"  {' '.join(cells)}{flags}"


def psi_limit(column: ColumnDrift) -> float | None:
    """Return the PSI above which a column is flagged; None if it never is."""
    psi = column.psi
    if psi.limit is None or psi.threshold is None:
        return None
    return max(psi.limit, psi.threshold)


def changed(share: ShareDrift) -> str:
    """Return a share before and now, as "10.0 % -> 12.5 %"."""
    then = "?" if share.then is None else percent(share.then)
    return f"{then} -> {percent(share.now)}"


def details(column: ColumnDrift) -> list[str]:
    """Return lines on what changed in a column."""
    lines = []
    if column.quantiles:
        cells = (
            f"{100 * q.share:g} % {_number(q.then)} -> {_number(q.now)}" for q in column.quantiles
        )
        lines.append(f"quantiles: {'; '.join(cells)}")
    if column.movers:
        lines.append(f"moved most: {'; '.join(map(_mover, column.movers))}")
    if column.new_values:
        lines.append(f"most frequent unseen: {'; '.join(map(_mover, column.new_values))}")
    return lines


def _mover(mover: Mover) -> str:
    then = "" if mover.then is None else f"{percent(mover.then)} -> "
    return f"{mover.value:.40} {then}{percent(mover.now)}"


def _number(value: float | None) -> str:
    return "inf" if value is None else f"{value:.6g}"


def _verdict(drift: Drift) -> str:
    if not drift.flags:
        return f"no drift: none of {drift.tests} measures exceeds its threshold"
    count = len(drift.flags)
    return f"drift: {count} of {drift.tests} measures exceed their thresholds"
