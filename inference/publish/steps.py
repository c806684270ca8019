"""Publishing a bundle, compared with the one that is served, and going back to the one before."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError, SchemaError
from nvt_torchrec.dlrm.metrics import Metrics
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.accuracy import score_labelled
from nvt_torchrec.inference.inputs.successors import check_same_columns
from nvt_torchrec.inference.model.bundle import WORKFLOW, bundle_digest, bundle_name, describe
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.publish.history import PUBLISH, ROLLBACK, Entry
from nvt_torchrec.inference.publish.store import Store, open_store
from nvt_torchrec.workflows.description import inspect

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
class Published:
    """What came of publishing or rolling back.

    Attributes:
        name: The name of the bundle.
        before: The name of the bundle that was served before; None if none was.
        metrics: The metrics on the sample of the bundle that was served, if any, and the new one.
        refusals: Why the bundle is not served; empty if it is.
        removed: The names of the bundles that were removed.
    """

    name: str
    before: str | None
    metrics: dict[str, Metrics] = dataclasses.field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def publish(
    bundle: Path,
    to: Path,
    sample: Sample | None = None,
    keep: int | None = None,
    *,
    allow_older: bool = False,
) -> Published:
    """Check a bundle, compare it with the one that is served, and serve it from now on.

    Args:
        bundle: Directory of the bundle.
        to: Directory of published bundles.
        sample: Labelled rows; None: do not compare.
        keep: The number of bundles to keep; None: keep all.
        allow_older: Serve it even if the workflow that is served was extended from its workflow.

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
            removed = () if keep is None else tuple(store.prune(keep))
            return Published(name, before, removed=removed)
        metrics, refusals = {}, []
        served = None if before is None else _served_workflow(store, before)
        if served is not None:
            check_same_columns(served.spec, new.spec, str(bundle))
            ancestor = served.ancestor(new.workflow.digest)
            if ancestor and ancestor.digest != served.digest and not allow_older:
                refusals.append(
                    f"its workflow is generation {ancestor.number}, that of the bundle that is "
                    f"served {served.generation}: --rollback serves the one before again, "
                    "--allow_older any"
                )
        if sample is not None and not refusals:
            metrics = _compare(store, before, new, sample)
            refusals = _refusals(metrics, sample)
        if refusals:
            return Published(name, before, metrics, tuple(refusals))
        del new
        if bundle_digest(store.add(bundle)) != digest:
            raise BadInputError(f"{bundle}: has changed meanwhile", "publish it again")
        measured = metrics["new"].to_dict() if metrics else None
        store.switch(Entry.now(PUBLISH, digest, generation=generation, metrics=measured))
        removed = () if keep is None else tuple(store.prune(keep))
        return Published(name, before, metrics, removed=removed)


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


def _served_workflow(store: Store, name: str) -> WorkflowDescription | None:
    try:
        return inspect(store.path(name) / WORKFLOW)
    except ClickLogError as error:  # it cannot be compared; servers have it in memory
        log.warning("the bundle is not compared with %s, which is served: %s", name, error.what)
        return None


def _compare(
    store: Store, before: str | None, new: Predictor, sample: Sample
) -> dict[str, Metrics]:
    predictors = {"new": new}
    if before is not None:
        try:
            predictors = {"served": Predictor.load(store.path(before), check=True), **predictors}
        except (BadInputError, SchemaError) as error:
            raise _damaged(error) from error
    metrics = score_labelled(predictors, sample.path, sample.format, sample.rows)
    if metrics["new"].auroc is None:
        raise BadInputError(
            f"{sample.path}: its first {metrics['new'].samples} rows have the same label: they "
            "tell nothing about a model",
            "pass more rows (--sample_rows), or others",
        )
    return metrics


def _refusals(metrics: dict[str, Metrics], sample: Sample) -> list[str]:
    """Say by what the new bundle breaks the limits; nothing if it does not."""
    if "served" not in metrics:
        return []
    served, new = metrics["served"], metrics["new"]
    drop = served.auroc - new.auroc
    growth = abs(new.calibration - 1) - abs(served.calibration - 1)
    limits = (
        ("AUROC falls by", drop, "max_auroc_drop"),
        ("the calibration error grows by", growth, "max_calibration_change"),
    )
    return [
        f"{what} {change:.6f}, more than --{flag} {getattr(sample, flag):g}"
        for what, change, flag in limits
        if change > getattr(sample, flag)
    ]
