"""``ClickModel``: a frame in, probabilities out, by scikit-learn's conventions."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import assert_all_finite, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.clicklog.text.remedies import suggest_column
from nvt_torchrec.estimator.bundle_bytes import pack_bundle, unpack_bundle
from nvt_torchrec.estimator.fit_folder import FitFolder
from nvt_torchrec.estimator.fit_steps import FitSettings, add_label, open_spec, run_fit
from nvt_torchrec.estimator.input_table import has_columns, make_table, matrix_to_table
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.models.registry import DEFAULT_MODEL

#: The fewest rows: one each for train, valid and test.
_MIN_ROWS = 3
#: The label's column where it has no name.
_LABEL = "label"
#: How the names of temporary folders begin.
_TEMPORARY = "click-model-"


class ClickModel(ClassifierMixin, BaseEstimator):
    """A click-through-rate model as a binary classifier of scikit-learn.

    :meth:`fit` writes a feature spec, runs the ETL, trains and makes a bundle, as the commands
    ``nvt-etl guess``, ``nvt-etl run``, ``nvt-train`` and ``nvt-infer bundle`` do, in one folder:
    ``log.parquet``, ``spec.toml``, ``OUT``, ``CKPT``, ``LOG`` and ``BUNDLE``. These commands can go
    on with it.

    Args:
        spec: The feature spec: a path or name as for ``nvt-etl run --spec``, or the keys of such a
            file as a dict. None: it is guessed from the rows.
        model: A model of this project or MODULE:FUNCTION, as for ``nvt-train --model``.
        events: Whether a guessed spec counts what happened before a row (docs/events.md).
        valid: The share of the rows for validation, on which training stops. None: 0.1, or, where
            the rows have a time, what comes before test.
        test: The share of the rows for test, on which ``metrics_`` are measured; likewise.
        folder: The folder of the fit, with which other commands go on. It must be absent, empty, or
            that of an earlier fit, which is replaced. None: a temporary folder, which is deleted
            with the estimator.
        random_state: The seed of the training: an integer, None or a NumPy ``RandomState``.
        verbose: 1: show the log of the steps on stderr.
        settings: Further settings of the training, fields of ``TrainSettings``:
            ``{"epochs": 3, "embedding_dim": 32}``.

    Attributes:
        classes_: The two classes; the second is the one whose probability the model predicts. Of
            labels that are read by a spec, 0 and 1.
        feature_names_in_: The columns of X without the label's, if they have names.
        n_features_in_: How many columns there are.
        metrics_: The metrics of valid and test, by split, as ``nvt-train --json`` prints them.
        baselines_: Those of the logistic regression and of boosted trees, by split and name.
        pages_: The paths of the pages of the data and of the training.
        folder_: The folder.
        predictor_: Scores rows; see :class:`inference.predictor.Predictor`.
    """

    def __init__(
        self,
        spec: str | Path | Mapping[str, Any] | FeatureSpec | None = None,
        *,
        model: str = DEFAULT_MODEL,
        events: bool = False,
        valid: float | None = None,
        test: float | None = None,
        folder: str | Path | None = None,
        random_state: Any = 0,
        verbose: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = spec
        self.model = model
        self.events = events
        self.valid = valid
        self.test = test
        self.folder = folder
        self.random_state = random_state
        self.verbose = verbose
        self.settings = settings

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn asks of an estimator: two classes, and values may be missing."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None, *, label: str | None = None) -> Self:  # noqa: N803
        """Fit a model.

        Args:
            X: A frame of pandas or Polars, an Arrow table, a dict of columns, or a matrix of
                numbers. Missing values are None, NaN or NA.
            y: The labels, of two values; the larger one is predicted. X then consists of features
                alone, and none of them is left out for giving the label away.
            label: Instead of y, the label's column in X. Then X is a log: columns that give the
                label away are left out, with a warning. None: the label of the spec, or one that is
                found.

        Returns:
            The estimator.

        Raises:
            ClickLogError: A value cannot be read, or a parameter is wrong; the message has the
                remedy.
            ValueError: X or y is not what scikit-learn takes.
        """
        spec = None if self.spec is None else open_spec(self.spec)
        shares = {}
        if self.valid is not None:
            shares["valid"] = self.valid
        if self.test is not None:
            shares["test"] = self.test
        fit = FitSettings(
            spec=spec,
            label=label or "",
            shares=shares,
            events=self.events,
            chosen=y is not None,
            model=self.model,
            seed=self._choose_seed(),
            training=self.settings or {},
        )
        table = self._take_features(X, y, label)
        classes = np.array([0, 1])
        if y is not None:
            fit, table, classes = self._take_labels(y, table, fit)
        with self._make_folder() as folder, _show_log(self.verbose):
            spec, result = run_fit(table, folder, fit)
        label_columns: set[str] = set()
        for name in spec.labels:
            label_columns.update(spec.field_sources(name))
        names = [name for name in table.column_names if name not in label_columns]
        self.n_features_in_ = len(names)
        if has_columns(X):
            self.feature_names_in_ = np.array(names, dtype=object)
        self.classes_ = classes
        self.metrics_, self.baselines_ = result.metrics, result.baselines
        self.pages_ = {"data": folder.output.report, "training": folder.training_page}
        self._open(folder, temporary=self.folder is None)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the probabilities [rows, 2] of ``classes_``.

        Args:
            X: Rows as in :meth:`fit`. Columns are found by name, and further ones are ignored; a
                matrix has the columns of ``feature_names_in_``, in their order.

        Raises:
            NotFittedError: The estimator is not fitted.
            SchemaError: A column is missing, or has a type that cannot hold its raw type.
            InvalidRowError: A column cannot hold a value.
            ValueError: A matrix has other columns.
        """
        check_is_fitted(self)
        if has_columns(X) and hasattr(self, "feature_names_in_"):
            table = make_table(X)
        else:
            table = self._take_matrix(X, reset=False)
        clicked = self.predictor_.predict(table).astype(np.float64)
        return np.column_stack([1 - clicked, clicked])

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the class [rows] that is more probable; see :meth:`predict_proba`."""
        clicked = self.predict_proba(X)[:, 1]
        return self.classes_[(clicked > 0.5).astype(np.int64)]

    def save(self, path: str | Path) -> None:
        """Copy the bundle, which ``Predictor.load(path)`` and ``nvt-infer serve --bundle`` open.

        Raises:
            NotFittedError: The estimator is not fitted.
            OutputError: ``path`` exists, or cannot be written.
        """
        check_is_fitted(self)
        with new_directory(Path(path)) as directory:
            shutil.copytree(FitFolder(self.folder_).bundle, directory, dirs_exist_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: its parameters, and its bundle as bytes."""
        state = dict(super().__getstate__())
        if "predictor_" in state:
            for name in ("_delete", "folder_", "pages_"):
                state.pop(name, None)
            state["predictor_"] = pack_bundle(FitFolder(self.folder_).bundle)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose temporary folder has the bundle alone."""
        packed = state.pop("predictor_", None)
        super().__setstate__(state)
        if packed is not None:
            folder = FitFolder(Path(tempfile.mkdtemp(prefix=_TEMPORARY)))
            unpack_bundle(packed, folder.bundle)
            self._open(folder, temporary=True)

    def _choose_seed(self) -> int:
        """Return the seed of the training that ``random_state`` stands for."""
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _take_features(self, X: Any, y: Any, label: str | None) -> pa.Table:  # noqa: N803
        """Return X as a table, with its label if it is there."""
        if label is not None and y is not None:
            raise SettingsError("y and label are both given", "give one: label is a column of X")
        if not has_columns(X):
            if y is None:
                raise ValueError(
                    "This ClickModel estimator requires y to be passed, but the target y is None: "
                    "a matrix has no column for the label."
                )
            return self._take_matrix(X, reset=True)
        table = make_table(X)
        if table.num_rows < _MIN_ROWS:
            raise ValueError(f"n_samples = {table.num_rows}, a minimum of {_MIN_ROWS} is required")
        if label is not None and self.spec is None and label not in table.column_names:
            names = table.column_names
            raise SchemaError(
                f"there is no column {label} for the label",
                f"{suggest_column(label, names, ())}X has {', '.join(names[:20])}",
            )
        return table

    def _take_matrix(self, X: Any, *, reset: bool) -> pa.Table:  # noqa: N803
        """Return a matrix of numbers as a table, after scikit-learn's checks."""
        matrix = validate_data(
            self,
            X,
            reset=reset,
            dtype="numeric",
            ensure_all_finite="allow-nan",
            ensure_min_samples=_MIN_ROWS if reset else 1,
        )
        numbered = [f"x{i}" for i in range(matrix.shape[1])]
        return matrix_to_table(matrix, getattr(self, "feature_names_in_", numbered))

    def _take_labels(
        self, y: Any, table: pa.Table, fit: FitSettings
    ) -> tuple[FitSettings, pa.Table, np.ndarray]:
        """Return the settings and the table with labels that were given, and their classes [2]."""
        values = column_or_1d(y, warn=True)
        assert_all_finite(values, input_name="y")
        if len(values) != table.num_rows:
            raise ValueError(f"X has {table.num_rows} rows, and y has {len(values)}")
        check_classification_targets(values)
        kind = type_of_target(values, input_name="y", raise_unknown=True)
        if kind != "binary":
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}."
            )
        classes, codes = np.unique(values, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(
                f"y is all of one class, {classes[0]!r}: a model learns from rows of both"
            )
        if fit.spec is not None:
            [name] = fit.spec.field_sources(fit.spec.label)
        else:
            name = _name_label(y, table)
            fit = dataclasses.replace(fit, label=name)
        return fit, add_label(table, name, codes.astype(np.int64), fit.spec), classes

    @contextlib.contextmanager
    def _make_folder(self) -> Iterator[FitFolder]:
        """Yield the folder of a fit; a temporary one is deleted if the fit fails."""
        if self.folder is not None:
            folder = FitFolder(Path(self.folder).absolute())
            folder.clear()
            yield folder
            return
        temporary = tempfile.mkdtemp(prefix=_TEMPORARY)
        try:
            yield FitFolder(Path(temporary))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _open(self, folder: FitFolder, *, temporary: bool) -> None:
        """Score with the bundle of a folder from now on.

        A temporary folder is deleted when the estimator is, or when it is fitted again.
        """
        from nvt_torchrec.inference.predictor import Predictor

        self.predictor_ = Predictor.load(folder.bundle)
        self.folder_ = folder.root
        before = getattr(self, "_delete", None)
        if before is not None:
            before()  # the temporary folder of an earlier fit
        self._delete = None
        if temporary:
            self._delete = weakref.finalize(self, shutil.rmtree, folder.root, ignore_errors=True)


def _name_label(y: Any, table: pa.Table) -> str:
    """Return the name of the column for labels that were given: y's own, or a free one.

    Raises:
        SettingsError: X has a column of y's name.
    """
    given = getattr(y, "name", None)
    if given in table.column_names:
        raise SettingsError(
            f"X has a column {given}, and y is named so: it would give the label away",
            f"leave it out of X; or give label={given!r} in the place of y",
        )
    name = given if isinstance(given, str) and given else _LABEL
    while name in table.column_names:
        name += "_"
    return name


@contextlib.contextmanager
def _show_log(verbose: int) -> Iterator[None]:
    """Show the log of the steps meanwhile: where the program's own log goes, or on stderr."""
    if not verbose:
        yield
        return
    logger = logging.getLogger("nvt_torchrec")
    level = logger.level
    handler = None if logger.hasHandlers() else logging.StreamHandler()
    if handler is not None:
        logger.addHandler(handler)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        if handler is not None:
            logger.removeHandler(handler)
