"""``ClickModel``, an estimator that follows scikit-learn's conventions."""

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

#: The minimum number of rows: one each for train, valid and test.
_MIN_ROWS = 3
#: The default name of the label's column.
_LABEL = "label"
#: The prefix of the names of temporary folders.
_TEMPORARY = "click-model-"


class ClickModel(ClassifierMixin, BaseEstimator):
    """A click-through-rate model as a binary classifier for scikit-learn.

    :meth:`fit` guesses a feature spec, runs the ETL, trains a model and makes a bundle, like the
    commands ``nvt-etl guess``, ``nvt-etl run``, ``nvt-train`` and ``nvt-infer bundle``. It writes
    their files to one folder: ``log.parquet``, ``spec.toml``, ``OUT``, ``CKPT``, ``LOG`` and
    ``BUNDLE``. All commands work with this folder.

    Args:
        spec: The feature spec: a path or name as for ``nvt-etl run --spec``, or the keys of such a
            file as a dict. None: guess it from the rows.
        model: A model of this project or MODULE:FUNCTION, as for ``nvt-train --model``.
        events: Whether a guessed spec includes features of the events before a row
            (docs/events.md).
        valid: The share of rows for validation, which decides when training stops. If the rows have
            a time, these are the rows before those of test. None: about 0.1.
        test: The share of rows for test, on which ``metrics_`` are measured. If the rows have a
            time, these are the last rows. None: about 0.1.
        folder: The folder of the fit: a new or empty one, or the folder of an earlier fit, which is
            replaced. None: a temporary folder, which is deleted with the estimator.
        random_state: The seed of the training: an integer, None or a NumPy ``RandomState``.
        verbose: 1 shows the log of the steps on stderr; 0 does not.
        settings: Additional settings of the training, which are fields of ``TrainSettings``, for
            example ``{"epochs": 3, "embedding_dim": 32}``.

    Attributes:
        classes_: The two classes. The model predicts the probability of the second. If a spec reads
            the label, they are 0 and 1.
        feature_names_in_: The names of the columns of X without the label, if X has names.
        n_features_in_: The number of these columns.
        metrics_: The metrics on valid and test by split, as in ``nvt-train --json``.
        baselines_: The metrics of the logistic regression and of boosted trees, by split and name.
        pages_: The paths of the report pages of the data and of the training.
        folder_: The folder of the fit.
        predictor_: The :class:`inference.predictor.Predictor` that scores rows.
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
        """Return the estimator's tags: two classes only, and values may be missing."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None, *, label: str | None = None) -> Self:  # noqa: N803
        """Fit a model.

        Args:
            X: A pandas or Polars frame, an Arrow table, a dict of columns, or a matrix of numbers.
                Missing values are None, NaN or NA.
            y: The labels, which have two distinct values; the probability of the larger one is
                predicted. All columns of X are then features, even those that give the label away.
            label: The column of X that is the label, instead of y. X is then treated as a log:
                columns that give the label away are left out, with a warning. None: the label of
                the spec, or a guessed one.

        Returns:
            The estimator.

        Raises:
            ClickLogError: A value cannot be read or a parameter is invalid. The message contains a
                remedy.
            ValueError: X or y does not pass scikit-learn's checks.
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
        self.metrics_ = result.metrics
        self.baselines_ = result.baselines
        self.pages_ = {"data": folder.output.report, "training": folder.training_page}
        self._open(folder, temporary=self.folder is None)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the probabilities of ``classes_``, float64 [rows, 2].

        Args:
            X: Rows, in one of the types of :meth:`fit`. Columns are found by name, and additional
                columns are ignored. The columns of a matrix must be those of :meth:`fit`, in the
                same order.

        Raises:
            NotFittedError: The estimator is not fitted.
            SchemaError: A column is missing or has a type that does not match the spec.
            InvalidRowError: A value does not match the spec.
            ValueError: A matrix has a different number of columns than in :meth:`fit`.
        """
        check_is_fitted(self)
        if has_columns(X) and hasattr(self, "feature_names_in_"):
            table = make_table(X)
        else:
            table = self._take_matrix(X, reset=False)
        clicked = self.predictor_.predict(table).astype(np.float64)
        return np.column_stack([1 - clicked, clicked])

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the more probable class of each row, [rows].

        Args:
            X: Rows, as for :meth:`predict_proba`, which raises the same errors.
        """
        clicked = self.predict_proba(X)[:, 1]
        return self.classes_[(clicked > 0.5).astype(np.int64)]

    def save(self, path: str | Path) -> None:
        """Save the bundle, which ``Predictor.load(path)`` and ``nvt-infer serve --bundle`` open.

        Args:
            path: The directory to create.

        Raises:
            NotFittedError: The estimator is not fitted.
            OutputError: ``path`` exists or cannot be written.
        """
        check_is_fitted(self)
        with new_directory(Path(path)) as directory:
            shutil.copytree(FitFolder(self.folder_).bundle, directory, dirs_exist_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: the attributes, with the bundle as bytes."""
        state = dict(super().__getstate__())
        if "predictor_" in state:
            for name in ("_delete", "folder_", "pages_"):
                state.pop(name, None)
            state["predictor_"] = pack_bundle(FitFolder(self.folder_).bundle)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state, with a temporary folder that contains only the bundle."""
        packed = state.pop("predictor_", None)
        super().__setstate__(state)
        if packed is not None:
            folder = FitFolder(Path(tempfile.mkdtemp(prefix=_TEMPORARY)))
            unpack_bundle(packed, folder.bundle)
            self._open(folder, temporary=True)

    def _choose_seed(self) -> int:
        """Return the seed of the training, from ``random_state``."""
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _take_features(self, X: Any, y: Any, label: str | None) -> pa.Table:  # noqa: N803
        """Convert X, including its label column if it has one, to a table."""
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
        """Convert a matrix of numbers to a table, after scikit-learn's checks.

        ``reset`` means that this matrix determines the number of features.
        """
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
        """Add the labels ``y`` to the table; return the settings, the table and the classes [2]."""
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
                f"y has only one class, {classes[0]!r}: a model needs rows of both classes"
            )
        if fit.spec is not None:
            [name] = fit.spec.field_sources(fit.spec.label)
        else:
            name = _name_label(y, table)
            fit = dataclasses.replace(fit, label=name)
        return fit, add_label(table, name, codes.astype(np.int64), fit.spec), classes

    @contextlib.contextmanager
    def _make_folder(self) -> Iterator[FitFolder]:
        """Yield the folder of a fit; delete a temporary one if the fit fails."""
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
        """Use the bundle of a folder for predictions from now on.

        A temporary folder is deleted with the estimator, or when the estimator is fitted again.
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
    """Return a name for the column of the labels ``y``: y's own name, or an unused one.

    Raises:
        SettingsError: X has a column with y's name.
    """
    given = getattr(y, "name", None)
    if given in table.column_names:
        raise SettingsError(
            f"X has a column {given}, which is also the name of y: it would give the label away",
            f"remove it from X, or give label={given!r} instead of y",
        )
    name = given if isinstance(given, str) and given else _LABEL
    while name in table.column_names:
        name += "_"
    return name


@contextlib.contextmanager
def _show_log(verbose: int) -> Iterator[None]:
    """Show the log of the steps inside the context, by the program's log handlers or on stderr."""
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
