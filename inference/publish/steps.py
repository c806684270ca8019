"""Publishing a bundle, compared with the one that is served, and going back to the one before."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError, SchemaError
from nvt_torchrec.dlrm.metrics import Metrics
from nvt_torchrec.inference.accuracy import score_labelled
from nvt_torchrec.inference.inputs.successors import check_same_columns
from nvt_torchrec.inference.model.bundle import bundle_digest, bundle_name, describe
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.publish.history import PUBLISH, ROLLBACK, Entry
from nvt_torchrec.inference.publish.store import Store, open_store

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Sample:
    """The labelled raw rows to compare bundles on.

    Attributes:
        path: Path of the log: TSV, CSV or parquet.
        rows: The number of its first rows to take.
        format: Its format; None for that of the training log, or parquet if the path ends so.
        max_auroc_drop: By how much the AUROC of a new bundle may be lower.
        max_calibration_change: By how much its calibration may be further from 1.
    """

    path: str
    rows: int
    format: str | None
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

    def refusals(self, sample: Sample) -> list[str]:
        """Say by what the new bundle breaks the limits; nothing if it does not."""
        if self.served is None:
            return []
        refusals = []
        drop = _auroc(self.served) - _auroc(self.new)
        if drop > sample.max_auroc_drop:
            refusals.append(
                f"AUROC falls by {drop:.6f}, more than --max_auroc_drop {sample.max_auroc_drop:g}"
            )
        growth = _calibration_error(self.new) - _calibration_error(self.served)
        if growth > sample.max_calibration_change:
            refusals.append(
                f"the calibration error grows by {growth:.6f}, more than --max_calibration_change "
                f"{sample.max_calibration_change:g}"
            )
        return refusals

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
    assert metrics.auroc is not None  # checked by _compare
    return metrics.auroc


def _calibration_error(metrics: Metrics) -> float:
    """Return how far the mean prediction over the mean label is from 1."""
    assert metrics.calibration is not None  # checked by _compare
    return abs(metrics.calibration - 1)


@dataclasses.dataclass(frozen=True)
class Published:
    """What came of publishing or rolling back.

    Attributes:
        name: The name of the bundle.
        before: The name of the bundle that was served before; None if none was.
        comparison: The metrics on the sample; None without one.
        refusals: Why the bundle is not served; empty if it is.
        removed: The names of the bundles that were removed.
    """

    name: str
    before: str | None
    comparison: Comparison | None = None
    refusals: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def publish(
    bundle: Path, to: Path, sample: Sample | None = None, keep: int | None = None
) -> Published:
    """Check a bundle, compare it with the one that is served, and serve it from now on.

    Args:
        bundle: Directory of the bundle.
        to: Directory of published bundles.
        sample: Labelled rows; None: do not compare.
        keep: The number of bundles to keep; None: keep all.

    Raises:
        BadInputError: The bundle, the bundle that is served or the sample is missing or damaged.
        SchemaError: Its columns are not those of the bundle that is served.
        OutputError: ``to`` is something else, cannot be written, or another command works on it.
    """
    generation, digest = describe(bundle).generation, bundle_digest(bundle)
    with open_store(to, create=True) as store:
        before, name = store.served_name(), bundle_name(digest)
        new = Predictor.load(bundle, check=True)
        if before == name:
            _check_served(store, name)
            return Published(name, before)
        if before is not None:
            _check_columns(store, before, new, bundle)
        comparison = None if sample is None else _compare(store, before, new, sample)
        if sample is not None and comparison is not None:
            refusals = comparison.refusals(sample)
            if refusals:
                return Published(name, before, comparison, tuple(refusals))
        del new
        if bundle_digest(store.add(bundle)) != digest:
            raise BadInputError(f"{bundle}: has changed meanwhile", "publish it again")
        metrics = None if comparison is None else comparison.new.to_dict()
        store.switch(Entry.now(PUBLISH, digest, generation=generation, metrics=metrics))
        removed = () if keep is None else tuple(store.prune(keep))
        return Published(name, before, comparison, removed=removed)


def rollback(to: Path) -> Published:
    """Serve the bundle again that was served before, once its digests are compared.

    Raises:
        OutputError: There is none, or ``to`` cannot be written.
        BadInputError: ``to`` is missing or damaged, or the bundle to go back to is.
    """
    with open_store(to, create=False) as store:
        before, target = store.served_name(), store.before()
        try:
            Predictor.load(store.path(target.name), check=True)
        except (BadInputError, SchemaError) as error:
            raise BadInputError(
                f"the bundle to roll back to cannot be served: {error.what}",
                "publish another bundle",
            ) from error
        store.switch(Entry.now(ROLLBACK, target.bundle, generation=target.generation))
        return Published(target.name, before)


def _check_served(store: Store, name: str) -> None:
    try:
        describe(store.path(name), check=True)
    except ClickLogError as error:
        raise _damaged(error) from error


def _damaged(error: ClickLogError) -> OutputError:
    return OutputError(
        f"the bundle that is served is damaged: {error.what}",
        "go back with --rollback, or publish another bundle without --sample; then publish this "
        "one again",
    )


def _check_columns(store: Store, before: str, new: Predictor, bundle: Path) -> None:
    from nvt_torchrec.workflows.description import inspect

    try:
        spec = inspect(store.path(before) / "workflow").spec
    except ClickLogError as error:  # it cannot be compared; servers have it in memory
        log.warning("the columns are not compared with those of %s: %s", before, error.what)
        return
    check_same_columns(spec, new.spec, str(bundle))


def _compare(store: Store, before: str | None, new: Predictor, sample: Sample) -> Comparison:
    served = None
    if before is not None:
        try:
            served = Predictor.load(store.path(before), check=True)
        except (BadInputError, SchemaError) as error:
            raise _damaged(error) from error
    predictors = {"new": new} if served is None else {"new": new, "served": served}
    scored = score_labelled(predictors, sample.path, sample.format, sample.rows)
    labels, metrics = scored.labels, scored.metrics()
    if metrics["new"].auroc is None:
        raise BadInputError(
            f"{sample.path}: the label of its first {len(labels)} rows is {int(labels[0])}: they "
            "tell nothing about a model",
            "pass more rows (--sample_rows), or others",
        )
    return Comparison(metrics["new"], metrics.get("served"))
