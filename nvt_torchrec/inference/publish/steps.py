"""Publish a bundle after comparing it with the served one, or roll back to the previous one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError, SchemaError
from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.inference.bulk import measure_probabilities, read_pieces
from nvt_torchrec.inference.model.bundle import (
    WORKFLOW,
    compute_bundle_digest,
    make_bundle_name,
    read_description,
)
from nvt_torchrec.inference.model.served_checkpoint import check_same_interface
from nvt_torchrec.inference.predictor import Predictor, make_input_spec
from nvt_torchrec.inference.publish import PublishSettings
from nvt_torchrec.inference.publish.directory import PUBLISH, ROLLBACK, Entry, Store, open_store
from nvt_torchrec.inference.publish.trial import try_bundle
from nvt_torchrec.models.metrics import Metrics, to_json
from nvt_torchrec.workflows.description import inspect

log = logging.getLogger(__name__)

#: The bytes of the sample that are read at once.
_BLOCK_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Published:
    """The result of publishing or rolling back.

    Attributes:
        name: The name of the bundle.
        before: The name of the previously served bundle; None if no bundle was served.
        metrics: Label → "served" and "new" → metrics on the sample. "served" is missing if no
            bundle was served; without a comparison the dict is empty.
        refusals: The reasons for which the bundle is not served; empty if it is served.
        removed: The names of the bundles that were removed.
    """

    name: str
    before: str | None
    metrics: dict[str, dict[str, Metrics]] = dataclasses.field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def publish(settings: PublishSettings) -> Published:
    """Verify and try a bundle, compare it with the served one, and serve it from now on.

    Raises:
        BadInputError: The bundle, the served bundle or the sample is missing or damaged.
        SchemaError: The bundle's columns differ from the served bundle's.
        OutputError: The directory contains something else, cannot be written, or another command
            is working on it.
    """
    assert settings.bundle is not None
    bundle = settings.bundle
    generation = read_description(bundle).generation
    digest = compute_bundle_digest(bundle)
    name = make_bundle_name(digest)
    with open_store(settings.to, create=True) as store:
        before = store.read_served_name()
        if before != name:
            # A bundle may come from a stranger, so a separate process tries it before this one
            # opens it.
            try_bundle(bundle)
        new = Predictor.load(bundle, check=True)
        metrics: dict[str, dict[str, Metrics]] = {}
        if before == name:
            with _blame_served_bundle():
                read_description(store.get_path(name), check=True)
        else:
            refusals = [] if before is None else _check_successor(store, before, new, settings)
            if settings.sample is not None and not refusals:
                metrics = _compare(store, before, new, settings)
                refusals = _list_refusals(metrics, settings)
            if refusals:
                return Published(name, before, metrics, tuple(refusals))
            del new
            if compute_bundle_digest(store.add(bundle)) != digest:
                raise BadInputError(f"{bundle} has changed while it was read", "publish it again")
            new_metrics = to_json({label: models["new"] for label, models in metrics.items()})
            store.switch(
                Entry.make_now(PUBLISH, digest, generation=generation, metrics=new_metrics)
            )
        removed = () if settings.keep is None else tuple(store.prune(settings.keep))
        return Published(name, before, metrics, removed=removed)


def rollback(to: Path) -> Published:
    """Verify the digests of the previously served bundle, and serve it again.

    Raises:
        OutputError: No earlier bundle exists, or ``to`` cannot be written.
        BadInputError: ``to`` or the bundle to roll back to is missing or damaged.
    """
    with open_store(to, create=False) as store:
        before = store.read_served_name()
        target = store.find_rollback_target()
        Predictor.load(store.get_path(target.name), check=True)
        store.switch(Entry.make_now(ROLLBACK, target.bundle, generation=target.generation))
        return Published(target.name, before)


@contextlib.contextmanager
def _blame_served_bundle() -> Iterator[None]:
    """Turn errors of the served bundle into an OutputError whose remedy concerns that bundle."""
    try:
        yield
    except (BadInputError, SchemaError) as error:
        raise OutputError(
            f"the served bundle is damaged: {error.what}",
            "roll back with --rollback, or publish another bundle without --sample; then publish "
            "this one again",
        ) from error


def _check_successor(
    store: Store, before: str, new: Predictor, settings: PublishSettings
) -> list[str]:
    """Check that a bundle has the served bundle's columns, and is not of an earlier generation.

    Returns:
        The reason to refuse it if its generation is too early, unless the settings allow that;
        otherwise an empty list.

    Raises:
        SchemaError: The bundle has other columns or labels.
    """
    try:
        served = inspect(store.get_path(before) / WORKFLOW)
        labels = read_description(store.get_path(before)).model.labels
    except ClickLogError as error:
        # Servers may still have the damaged bundle in memory; it must be possible to replace it.
        log.warning("the bundle is not compared with the served bundle %s: %s", before, error.what)
        return []
    check_same_interface(served.spec, new.spec, (labels, new.labels), str(settings.bundle))
    ancestor = served.ancestor(new.workflow.digest)
    if ancestor is None or settings.allow_older:
        return []
    # Adding a day may change the events without changing the workflow's digest, which only covers
    # the files that encode columns. Then the generation in bundle.json tells which bundle is older.
    number = ancestor.number
    if served.spec.events:
        number = read_description(str(settings.bundle)).generation
    if number >= served.generation:
        return []
    return [
        f"its workflow is of generation {number}, the served bundle's of generation "
        f"{served.generation}: use --rollback to serve the previous bundle again, or --allow_older"
    ]


def _compare(
    store: Store, before: str | None, new: Predictor, settings: PublishSettings
) -> dict[str, dict[str, Metrics]]:
    """Compute the metrics on the sample of the served bundle, if any, and of the new one.

    Raises:
        BadInputError, SchemaError: The sample cannot be read, or all its labels are equal.
        OutputError: The served bundle is damaged.
    """
    predictors = {"new": new}
    if before is not None:
        with _blame_served_bundle():
            served = Predictor.load(store.get_path(before), check=True)
        predictors = {"served": served, "new": new}
    sample = settings.sample or ""
    metrics = score_labelled(predictors, sample, settings.format, settings.sample_rows)
    for label, models in metrics.items():
        if models["new"].auroc is None:
            raise BadInputError(
                f"{sample}: the first {models['new'].samples} rows have the same value of {label}, "
                "so that models cannot be compared",
                "pass more rows (--sample_rows), or another sample",
            )
    return metrics


def _list_refusals(metrics: dict[str, dict[str, Metrics]], settings: PublishSettings) -> list[str]:
    """Return a sentence for each limit that the new bundle breaks."""
    refusals = []
    for label, models in metrics.items():
        if "served" not in models:
            continue
        for refusal in _find_losses(models["served"], models["new"], settings):
            refusals.append(f"{label}: {refusal}" if len(metrics) > 1 else refusal)
    return refusals


def _find_losses(served: Metrics, new: Metrics, settings: PublishSettings) -> list[str]:
    """Return a sentence for each metric that is worse than the settings allow."""
    losses = []
    drop = (served.auroc or 0.0) - (new.auroc or 0.0)
    if drop > settings.max_auroc_drop:
        limit = f"--max_auroc_drop {settings.max_auroc_drop:g}"
        losses.append(f"AUROC falls by {drop:.6f}, more than {limit}")
    growth = abs((new.calibration or 0.0) - 1) - abs((served.calibration or 0.0) - 1)
    if growth > settings.max_calibration_change:
        limit = f"--max_calibration_change {settings.max_calibration_change:g}"
        losses.append(f"the calibration error grows by {growth:.6f}, more than {limit}")
    return losses


def score_labelled(
    predictors: Mapping[str, Predictor], path: str, file_format: str | None, max_rows: int
) -> dict[str, dict[str, Metrics]]:
    """Compute the metrics of several predictors on the same labelled rows.

    This takes about 60 bytes of memory per row.

    Args:
        predictors: Predictors of the same columns and labels, by name.
        path: The path of the log.
        file_format: The log's format, a key of ``INPUT_FORMATS``; None to choose it as
            :func:`inference.predictor.make_input_spec` does.
        max_rows: The most rows to read, from the first on.

    Returns:
        The metrics by label and name.

    Raises:
        SchemaError: The log has no labels, or the predictors predict different ones.
        BadInputError, BadRowError: The log has no rows, or a malformed row.
    """
    first = next(iter(predictors.values()))
    for name, predictor in predictors.items():
        if predictor.labels != first.labels:
            raise SchemaError(
                f"model {name} predicts {', '.join(predictor.labels)}, the first one "
                f"{', '.join(first.labels)}",
                "compare models of the same labels",
            )
    spec = make_input_spec(first.spec, path, file_format)
    pieces = read_pieces(spec, path, _BLOCK_BYTES)
    labels: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    scores: dict[str, list[np.ndarray]] = {name: [] for name in predictors}
    num_rows = 0
    with show_progress("evaluate") as bar:
        for piece in pieces:
            if not piece.label:
                raise SchemaError(f"{path} has no column {spec.label}", "pass rows with labels")
            rows = piece.parse()
            count = min(max_rows - num_rows, len(rows))
            labels.append(first.select_labels(rows)[:, :count])
            if rows.weight is not None:
                weights.append(rows.weight[:count])
            for name, predictor in predictors.items():
                scores[name].append(predictor.predict_rows(rows, piece.first)[:count])
            bar.update(count)
            num_rows += count
            if num_rows >= max_rows:
                break
    if not num_rows:
        raise BadInputError(f"{path} has no rows", "pass rows with labels")
    truth = np.concatenate(labels, 1)
    weight = np.concatenate(weights) if weights else None
    metrics: dict[str, dict[str, Metrics]] = {label: {} for label in first.labels}
    for name, parts in scores.items():
        probabilities = np.concatenate(parts)
        for t, label in enumerate(first.labels):
            metrics[label][name] = measure_probabilities(probabilities[:, t], truth[t], weight)
    return metrics


def format_table(metrics: Mapping[str, Metrics], title: str = "") -> str:
    """Format metrics as a table: a line for each model, and its change from the model above."""
    lines = [f"{title:8}{'rows':>12}{'AUROC':>12}{'log loss':>12}{'calibration':>14}"]
    figures: list[list[float | None]] = []
    for name, model in metrics.items():
        values = [model.auroc, model.log_loss, model.calibration]
        lines.append(_format_line(name, f"{model.samples:,}", values))
        figures.append(values)
    for before, after in itertools.pairwise(figures):
        changes: list[float | None] = []
        for old, new in zip(before, after, strict=True):
            # A value may be None: the AUROC is undefined if all labels are equal.
            changes.append(None if old is None or new is None else new - old)
        lines.append(_format_line("change", "", changes, "+"))
    return "\n".join(lines)


def _format_line(name: str, rows: str, values: Sequence[float | None], sign: str = "") -> str:
    """Format a line of the table; the sign "+" shows the sign of positive values too."""
    cells = ["-" if value is None else f"{value:{sign}.6f}" for value in values]
    return f"{name:8}{rows:>12}{cells[0]:>12}{cells[1]:>12}{cells[2]:>14}"
