"""The new bundle and the one that is served, compared on the same labelled rows."""

from __future__ import annotations

import dataclasses

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.dlrm.metrics import Metrics
from nvt_torchrec.inference.accuracy import score_labelled
from nvt_torchrec.inference.predictor import Predictor


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much worse than the served bundle a new one may be.

    Attributes:
        max_auroc_drop: By how much the AUROC may be lower.
        max_calibration_change: By how much the calibration may be further from 1.
    """

    max_auroc_drop: float
    max_calibration_change: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The metrics of both bundles on the sample.

    Attributes:
        new: Those of the new bundle.
        served: Those of the bundle that is served; None if none is.
    """

    new: Metrics
    served: Metrics | None = None

    def refusals(self, limits: Limits) -> list[str]:
        """Say by what the new bundle breaks the limits; nothing if it does not."""
        if self.served is None:
            return []
        found = []
        drop = _auroc(self.served) - _auroc(self.new)
        if drop > limits.max_auroc_drop:
            found.append(
                f"AUROC falls by {drop:.6f}, more than --max_auroc_drop {limits.max_auroc_drop:g}"
            )
        growth = calibration_error(self.new) - calibration_error(self.served)
        if growth > limits.max_calibration_change:
            found.append(
                f"the calibration error grows by {growth:.6f}, more than --max_calibration_change "
                f"{limits.max_calibration_change:g}"
            )
        return found

    def table(self) -> str:
        """Format a line for each bundle, and one for the change."""
        lines = [f"{'bundle':8}{'rows':>12}{'AUROC':>12}{'log loss':>12}{'calibration':>14}"]
        named = {"served": self.served, "new": self.new}
        for name, metrics in named.items():
            if metrics is not None:
                lines.append(
                    f"{name:8}{metrics.samples:>12,}{metrics.auroc:>12.6f}"
                    f"{metrics.log_loss:>12.6f}{metrics.calibration:>14.6f}"
                )
        if self.served is not None:
            changes = [
                f"{getattr(self.new, key) - getattr(self.served, key):>+{width}.6f}"
                for key, width in (("auroc", 12), ("log_loss", 12), ("calibration", 14))
            ]
            lines.append(f"{'change':8}{'':12}{''.join(changes)}")
        return "\n".join(lines)


def _auroc(metrics: Metrics) -> float:
    assert metrics.auroc is not None  # checked by compare_bundles
    return metrics.auroc


def calibration_error(metrics: Metrics) -> float:
    """Return how far the mean prediction over the mean label is from 1."""
    assert metrics.calibration is not None  # checked by compare_bundles
    return abs(metrics.calibration - 1)


def compare_bundles(
    new: Predictor, served: Predictor | None, path: str, file_format: str | None, most: int
) -> Comparison:
    """Score the first rows of a labelled raw log with both bundles.

    Args:
        new: The new bundle.
        served: The bundle that is served; None if none is.
        path: Path of the log: TSV, CSV or parquet.
        file_format: Its format; None for that of the training log, or parquet if the path ends so.
        most: The number of rows.

    Raises:
        SchemaError: The log has no labels, or the bundles predict different ones.
        BadInputError, BadRowError: It has no rows, malformed ones, or only labels of one kind.
    """
    predictors = {"new": new} if served is None else {"new": new, "served": served}
    scored = score_labelled(predictors, path, file_format, most)
    labels, found = scored.labels, scored.metrics()
    if found["new"].auroc is None:
        raise BadInputError(
            f"{path}: the label of its first {len(labels)} rows is {int(labels[0])}: they tell "
            "nothing about a model",
            "pass more rows (--sample_rows), or others",
        )
    return Comparison(found["new"], found.get("served"))
