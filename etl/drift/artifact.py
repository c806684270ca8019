"""The result of a comparison, ``day_N.json``: a versioned file, equal for equal inputs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from nvt_torchrec.base.files.artifact import Format
from nvt_torchrec.formats.day_names import name_of

FORMAT = Format("nvt-torchrec drift", 1, "a result of `python -m etl drift`")


@dataclasses.dataclass(frozen=True)
class ShareDrift:
    """The change of a share.

    Attributes:
        count: Rows (or values) of the day that are counted.
        total: All of them.
        then_count: Those that were counted in the baseline; None without a baseline.
        then_total: All of the baseline.
        change: The change that is compared with the threshold.
        threshold: The largest change; None for any.
        by_chance: Whether a change of this size is within the error rate of chance alone.
        flagged: Whether the change is larger than the threshold and than chance explains.
    """

    count: int
    total: int
    then_count: int | None
    then_total: int | None
    change: float | None
    threshold: float | None
    by_chance: bool
    flagged: bool

    @property
    def now(self) -> float:
        """The share of the day."""
        return self.count / max(1, self.total)

    @property
    def then(self) -> float | None:
        """The share of the baseline; None without one."""
        if self.then_count is None or not self.then_total:
            return None
        return self.then_count / self.then_total


@dataclasses.dataclass(frozen=True)
class PsiDrift:
    """The population stability index (PSI) of a column; see :mod:`base.stability`.

    Attributes:
        psi: The index.
        expected: What is expected of it without a shift, by chance.
        limit: What it exceeds without a shift with the error rate of one measure; None where the
            rows do not suffice for two buckets.
        threshold: The largest value; None for any.
        then: Rows of the baseline in each bucket; for a sample, sampled rows.
        now: Rows of the day in each bucket.
        flagged: Whether it is larger than the threshold and the limit.
    """

    psi: float
    expected: float
    limit: float | None
    threshold: float | None
    then: list[int]
    now: list[int]
    flagged: bool


@dataclasses.dataclass(frozen=True)
class Mover:
    """A value whose share of all present values changed.

    Attributes:
        value: The value as in a log.
        then: Its share in the baseline; None for a value out of vocabulary.
        now: Its share in the day. Of values out of vocabulary, a lower bound.
    """

    value: str
    then: float | None
    now: float


@dataclasses.dataclass(frozen=True)
class Quantile:
    """A quantile of raw values, missing ones filled; None for infinity."""

    share: float
    then: float | None
    now: float | None


@dataclasses.dataclass(frozen=True)
class ColumnDrift:
    """The drift of a column.

    Attributes:
        name: The column.
        kind: "dense", "categorical" or "hashed".
        sampled: Whether the buckets of the baseline are those of a sample of the training rows.
        psi: The shift of its distribution.
        missing: The change of the share of rows without a value.
        unseen: The change of the share of values out of vocabulary; None unless categorical.
        quantiles: Of a dense column.
        movers: Of a categorical column, the values whose shares changed most.
        new_values: Of a categorical column, the most frequent values out of vocabulary.
    """

    name: str
    kind: str
    sampled: bool
    psi: PsiDrift
    missing: ShareDrift
    unseen: ShareDrift | None = None
    quantiles: list[Quantile] = dataclasses.field(default_factory=list)
    movers: list[Mover] = dataclasses.field(default_factory=list)
    new_values: list[Mover] = dataclasses.field(default_factory=list)

    @property
    def flags(self) -> list[str]:
        """The measures that are flagged."""
        unseen = self.unseen is not None and self.unseen.flagged
        flagged = {
            "PSI": self.psi.flagged, "missing rate": self.missing.flagged, "unseen share": unseen,
        }  # fmt: skip
        return [name for name, is_flagged in flagged.items() if is_flagged]


@dataclasses.dataclass(frozen=True)
class Drift:
    """The comparison of a day with what a workflow was fitted on.

    Attributes:
        day: The number of the day.
        name: The name of the files of this result, ``day_24``.
        input: Path of the raw file.
        rows: Well-formed rows that were compared.
        limit_rows: How many rows were asked for; None for all.
        generation: The workflow's; None for a workflow without generations.
        workflow_digest: The digest of the workflow.
        baseline_days: The days that were counted.
        tests: The number of measures that were compared; each may exceed its limit by chance with
            the probability ``thresholds["false_alarm_rate"] / tests``.
        thresholds: As :meth:`etl.drift.thresholds.Thresholds.to_dict`.
        label_rate: The share of rows with label 1; the change is relative, beyond the range of the
            baseline's days. None for rows without labels.
        malformed: The share of malformed rows.
        columns: Dense columns, then categorical ones.
        flags: What is flagged, as "cat_3 PSI" or "label rate".
    """

    day: int
    name: str
    input: str
    rows: int
    limit_rows: int | None
    generation: int | None
    workflow_digest: str
    baseline_days: list[int]
    tests: int
    thresholds: dict[str, Any]
    label_rate: ShareDrift | None
    malformed: ShareDrift
    columns: list[ColumnDrift]
    flags: list[str]

    def column(self, name: str) -> ColumnDrift | None:
        """Return the drift of a column; None for a column that was not there."""
        return next((column for column in self.columns if column.name == name), None)


def result_name(path: str) -> str:
    """Return the name of the result for a raw file.

    It is ``day_24``, the date of a dated file, the name up to its number, or that of another file.
    """
    name = re.split(r"[/\\]", path)[-1]
    found = name_of(path)
    if found is None:
        return name.split(".")[0] or "day"
    return name.split(".")[0] if found.kind == "day" else found.other(found.number)


def write_drift(file: Path, drift: Drift) -> None:
    """Write a result as JSON. Raises :class:`OutputError`."""
    FORMAT.write(file, dataclasses.asdict(drift))


def read_drift(file: Path) -> Drift:
    """Read a result.

    Raises:
        BadInputError: The file is missing or damaged.
        SchemaError: Another version of this program wrote it.
    """
    remedy = "delete it, or compare the day again with `python -m etl drift`"
    return FORMAT.read(Drift, file, remedy)
