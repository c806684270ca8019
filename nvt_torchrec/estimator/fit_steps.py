"""The steps of a fit (spec, ETL, training, bundle), by the functions that the commands call."""

from __future__ import annotations

import dataclasses
import functools
import logging
import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import output_errors, write_text
from nvt_torchrec.base.startup import prepare_torch
from nvt_torchrec.clicklog.in_memory.frames import read_features
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.estimator.fit_folder import FitFolder
from nvt_torchrec.estimator.input_table import set_column
from nvt_torchrec.etl.commands.guess import HEAD_MB, guess_spec
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.units.writing import hash_values
from nvt_torchrec.formats.feature_spec import FeatureSpec, InputFormat
from nvt_torchrec.formats.feature_spec.field_checks import did_you_mean
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.feature_spec.toml_file import load_spec, make_spec
from nvt_torchrec.formats.splits import RowRule, compute_hash_cuts
from nvt_torchrec.models.registry import MODELS
from nvt_torchrec.training.settings.train_settings import TrainSettings

if TYPE_CHECKING:
    from nvt_torchrec.training.reporting.progress import TrainResult

log = logging.getLogger(__name__)

#: The number of rows of a row group of the log. Each thread of the ETL reads one row group.
_ROW_GROUP_ROWS = 1 << 17
#: The maximum number of seeds tried for a split.
_MAX_SEEDS = 1000
#: The maximum total number of rows hashed while seeds are tried.
_MAX_HASHED = 10_000_000
#: The settings of the trainer that a fit sets itself.
_OWN_SETTINGS = (
    "mode",
    "binary_path",
    "label",
    "model",
    "seed",
    "save_checkpoint_path",
    "log_path",
)
#: The maximum number of columns that a warning lists.
_MAX_SHOWN = 20
#: The remedy for a label that is neither 0 nor 1.
_LABEL_REMEDY = (
    "remove rows without a label; give y, such as X[{column!r}] >= 4, and remove the column from "
    "X; or give a spec with threshold or positive in [label]"
)

#: ``prepare_torch``, called only once per process, because it adds filters of warnings.
_prepare_torch = functools.cache(prepare_torch)


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """The settings of a fit, from the parameters of :class:`estimator.classifier.ClickModel`.

    Attributes:
        spec: A feature spec; None to guess it.
        label: The column of the label; "" for the label of the spec or a guessed one.
        shares: The given shares of valid and test.
        events: Whether a guessed spec includes features of the events before a row.
        chosen: Whether the caller has chosen the features, so that all columns except the label are
            used, even those that give the label away.
        model: A value of ``--model``.
        seed: The seed of the training.
        training: Fields of :class:`TrainSettings`.
    """

    spec: FeatureSpec | None
    label: str
    shares: Mapping[str, float]
    events: bool
    chosen: bool
    model: str
    seed: int
    training: Mapping[str, Any]

    def __post_init__(self) -> None:
        known = {field.name for field in dataclasses.fields(TrainSettings)}
        for name in self.training:
            if name in _OWN_SETTINGS:
                raise SettingsError(f"settings: {name} is set by fit", "leave it out")
            if name not in known:
                raise SettingsError(
                    f"settings: {name!r} is not a setting of nvt-train", did_you_mean(name, known)
                )
        if self.spec is None:
            return
        if self.shares:
            raise SettingsError(
                f"{' and '.join(self.shares)} given together with a spec",
                "set the shares in [split] of the spec",
            )
        if self.label and self.label not in self.spec.labels:
            raise SettingsError(
                f"label {self.label!r} is not a label of the spec",
                did_you_mean(self.label, self.spec.labels),
            )


def open_spec(given: Any) -> FeatureSpec:
    """Return a spec given as an object, as the keys of a file, or as a path or name.

    The spec's keys of text formats are dropped, because a frame is not text.

    Raises:
        SettingsError: ``given`` is not a spec, or the spec splits rows by the names of files.
    """
    if isinstance(given, Mapping):
        spec = make_spec(dict(given), "the spec")
    else:
        spec = given if isinstance(given, FeatureSpec) else load_spec(given)
    if spec.split.by == "files":
        raise SettingsError(
            "the spec's [split] is by files, but a frame has no files",
            "split by share, column or time",
        )
    kept = {name: getattr(spec.input, name) for name in ("list_separator", "decimal")}
    return dataclasses.replace(spec, input=InputFormat("parquet", **kept))


def run_fit(
    table: pa.Table, folder: FitFolder, fit: FitSettings
) -> tuple[FeatureSpec, TrainResult]:
    """Fit a model in an empty folder; return the spec and the result of the training.

    Raises:
        ClickLogError: A step fails, as the commands ``nvt-etl guess``, ``nvt-etl run``,
            ``nvt-train`` and ``nvt-infer bundle`` would.
        ValueError: All labels are equal.
    """
    # Check the settings of the training first, before anything that takes time.
    training = TrainSettings(
        binary_path=str(folder.output.splits),
        save_checkpoint_path=str(folder.checkpoint),
        log_path=str(folder.training_log),
        label=fit.label if fit.spec is not None and fit.label else None,
        model=fit.model,
        seed=fit.seed,
        **fit.training,
    )
    _prepare_torch()
    from nvt_torchrec.inference.model.bundle import write_bundle
    from nvt_torchrec.inference.model.served_checkpoint import import_model
    from nvt_torchrec.training.loop.train import train

    with output_errors(folder.log):
        pq.write_table(table, folder.log, row_group_size=_ROW_GROUP_ROWS)
    if fit.spec is None:
        spec = _guess(table, folder, fit)
    else:
        spec = fit.spec
        _check_classes(read_labels(table, spec, fit.label or spec.label))
    # Use the engine in this process: starting workers would take longer than the work.
    run(EtlSettings(str(folder.log), folder.output.root, spec, engine="cpu"))
    result = train(training)
    build = import_model(None if fit.model in MODELS else fit.model, folder.checkpoint)
    write_bundle(folder.output.workflow, folder.checkpoint, folder.bundle, build=build)
    return spec, result


def _guess(table: pa.Table, folder: FitFolder, fit: FitSettings) -> FeatureSpec:
    """Guess a spec for the log, write it to the folder and return it.

    Raises:
        SettingsError: No column or more than one column could be the label.
        InvalidRowError: A label is neither 0 nor 1.
        ValueError: All labels are equal.
    """
    guess = functools.partial(
        guess_spec,
        str(folder.log),
        fit.label,
        "",
        HEAD_MB,
        events=fit.events,
        outcomes=not fit.chosen,
    )
    made = guess(split=fit.shares)
    spec = make_spec(tomllib.loads(made.text), str(folder.spec))
    if made.label_candidates:
        raise SettingsError(
            f"column {' or '.join(made.label_candidates)} could be the label",
            "name it: fit(X, label=…)",
        )
    labels = read_labels(table, _drop_guessed_rules(spec), spec.label)
    _check_classes(labels)
    seed = choose_seed(labels, spec.split) if spec.split.by == "share" else 0
    if seed:
        made = guess(split={**fit.shares, "seed": seed})
        spec = make_spec(tomllib.loads(made.text), str(folder.spec))
    write_text(folder.spec, made.text)
    log.info("wrote %s\n%s", folder.spec, made.notes)
    if made.unread:
        lines = [f"{name}: {reason}" for name, reason in made.unread.items()]
        if len(lines) > _MAX_SHOWN:
            lines[_MAX_SHOWN:] = [f"and {len(lines) - _MAX_SHOWN} more"]
        log.warning("warning: columns are not read:\n  %s", "\n  ".join(lines))
    return spec


def _drop_guessed_rules(spec: FeatureSpec) -> FeatureSpec:
    """Return a guessed spec without rules for the label that the user must choose.

    A rule for two strings is kept, because it is obvious which one is 1. The threshold of a rating,
    or the positive ones of several strings, are the user's choice.
    """
    rules = []
    for rule in spec.label_rules:
        is_choice = rule.threshold is not None or (rule.positive and not rule.negative)
        rules.append(LabelRule(rule.name, rule.source) if is_choice else rule)
    return dataclasses.replace(spec, label_rules=tuple(rules))


def read_labels(table: pa.Table, spec: FeatureSpec, label: str) -> np.ndarray:
    """Return the values of a label by the rules of a spec, int64 [rows].

    Raises:
        InvalidRowError: A value is missing, or neither 0 nor 1.
        SchemaError: The column does not exist.
    """
    try:
        values, _ = read_features(table, spec, [label])[label]
    except InvalidRowError as error:
        remedy = _LABEL_REMEDY.format(column=error.column)
        raise InvalidRowError(error.row, error.column, error.reason, remedy) from None
    return np.asarray(values).astype(np.int64)


def _check_classes(labels: np.ndarray) -> None:
    """Check that both classes occur in the labels. Raises ValueError."""
    if len(np.unique(labels)) < 2:
        raise ValueError(
            f"all labels are of one class, {labels[0]}: a model needs rows of both classes"
        )


def choose_seed(labels: np.ndarray, split: Split) -> int:
    """Return the first seed for which each split by share has rows of both labels.

    With few rows, valid or test may have no click, or no row at all, by chance.

    Args:
        labels: The labels 0 and 1, int64 [rows].
        split: The shares.

    Returns:
        The seed. If no seed gives each split rows of both labels, return the seed with the largest
        number of non-empty splits and, among these, with the largest number of labels that occur,
        counted over all splits.
    """
    cuts = compute_hash_cuts(split.valid, split.test)
    rows = np.arange(len(labels))
    best_seed = 0
    best_score = (-1, -1)
    for seed in range(min(_MAX_SEEDS, 1 + _MAX_HASHED // len(rows))):
        # The same division of rows as in the ETL, whose only file has index 0.
        chosen = RowRule("share", cuts, seed).choose(hash_values(rows, seed, 0)).astype(np.int64)
        counts = np.bincount(2 * chosen + labels, minlength=6).reshape(3, 2)  # [splits, labels]
        if counts.all():
            return seed
        score = int(counts.any(1).sum()), int(np.count_nonzero(counts))
        if score > best_score:
            best_seed = seed
            best_score = score
    return best_seed


def add_label(table: pa.Table, name: str, labels: np.ndarray, spec: FeatureSpec | None) -> pa.Table:
    """Return the table with a column of labels.

    Args:
        table: The features.
        name: The name of the column.
        labels: The labels 0 and 1, int64 [rows].
        spec: The spec that reads the column, if the caller gave one.

    Raises:
        SettingsError: The spec derives the label from other values than 0 and 1.
    """
    rules = spec.label_rules if spec is not None else ()
    for rule in rules:
        if rule.column == name and (rule.positive or rule.threshold is not None):
            raise SettingsError(
                f"y is given, but the spec derives {rule.name} from column {name}",
                "leave y out, and add that column to X",
            )
    return set_column(table, name, labels)
