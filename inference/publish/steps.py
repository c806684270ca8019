"""Publishing a bundle, compared with the one that is served, and going back to the one before."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError, SchemaError
from nvt_torchrec.dlrm.metrics import Metrics
from nvt_torchrec.inference.accuracy import score_labelled
from nvt_torchrec.inference.model.bundle import WORKFLOW, bundle_digest, bundle_name, describe
from nvt_torchrec.inference.model.weights import check_same_columns
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.publish.settings import PublishSettings
from nvt_torchrec.inference.publish.store import PUBLISH, ROLLBACK, Entry, Store, open_store
from nvt_torchrec.workflows.description import inspect

log = logging.getLogger(__name__)


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


def publish(settings: PublishSettings) -> Published:
    """Check a bundle, compare it with the one that is served, and serve it from now on.

    Raises:
        BadInputError: The bundle, the bundle that is served or the sample is missing or damaged.
        SchemaError: Its columns are not those of the bundle that is served.
        OutputError: The directory is something else, cannot be written, or another command works
            on it.
    """
    bundle = settings.bundle
    generation, digest = describe(bundle).generation, bundle_digest(bundle)
    with open_store(settings.to, create=True) as store:
        before, name = store.served_name(), bundle_name(digest)
        new = Predictor.load(bundle, check=True)
        metrics: dict[str, Metrics] = {}
        if before == name:
            with _errors_of_served():
                describe(store.path(name), check=True)
        else:
            refusals = [] if before is None else _check_successor(store, before, new, settings)
            if settings.sample is not None and not refusals:
                metrics = _compare(store, before, new, settings)
                refusals = _refusals(metrics, settings)
            if refusals:
                return Published(name, before, metrics, tuple(refusals))
            del new
            if bundle_digest(store.add(bundle)) != digest:
                raise BadInputError(f"{bundle}: has changed meanwhile", "publish it again")
            measured = metrics["new"].to_dict() if metrics else None
            store.switch(Entry.now(PUBLISH, digest, generation=generation, metrics=measured))
        removed = () if settings.keep is None else tuple(store.prune(settings.keep))
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


@contextlib.contextmanager
def _errors_of_served() -> Iterator[None]:
    try:
        yield
    except (BadInputError, SchemaError) as error:
        raise OutputError(
            f"the bundle that is served is damaged: {error.what}",
            "go back with --rollback, or publish another bundle without --sample; then publish "
            "this one again",
        ) from error


def _check_successor(
    store: Store, before: str, new: Predictor, settings: PublishSettings
) -> list[str]:
    """Check that a bundle has the columns of the one that is served; return why it is too old."""
    try:
        served = inspect(store.path(before) / WORKFLOW)
    except ClickLogError as error:  # it cannot be compared; servers have it in memory
        log.warning("the bundle is not compared with %s, which is served: %s", before, error.what)
        return []
    check_same_columns(served.spec, new.spec, str(settings.bundle))
    ancestor = served.ancestor(new.workflow.digest)
    if ancestor is None or ancestor.digest == served.digest or settings.allow_older:
        return []
    return [
        f"its workflow is generation {ancestor.number}, that of the bundle that is served "
        f"{served.generation}: --rollback serves the one before again, --allow_older any"
    ]


def _compare(
    store: Store, before: str | None, new: Predictor, settings: PublishSettings
) -> dict[str, Metrics]:
    predictors = {"new": new}
    if before is not None:
        with _errors_of_served():
            predictors = {"served": Predictor.load(store.path(before), check=True), **predictors}
    sample = settings.sample
    metrics = score_labelled(predictors, sample, settings.format, settings.sample_rows)
    if metrics["new"].auroc is None:
        raise BadInputError(
            f"{sample}: its first {metrics['new'].samples} rows have the same label: they tell "
            "nothing about a model",
            "pass more rows (--sample_rows), or others",
        )
    return metrics


def _refusals(metrics: dict[str, Metrics], settings: PublishSettings) -> list[str]:
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
        f"{what} {change:.6f}, more than --{flag} {getattr(settings, flag):g}"
        for what, change, flag in limits
        if change > getattr(settings, flag)
    ]
