"""scikit-learn's own checks of an estimator, and what its tools make of a ClickModel."""

from __future__ import annotations

import copy
import gc
import pickle

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_validate
from sklearn.utils.estimator_checks import parametrize_with_checks

from nvt_torchrec import ClickModel
from tests.test_examples import clicks

#: Little training: the checks fit a hundred times.
QUICK = {"epochs": 2, "boosted_trees": False}


def features(rows: int = 600):
    """A frame without outcomes, and labels that are texts."""
    frame = clicks(rows)
    y = frame["clicked"].map({0: "no", 1: "yes"})
    return frame.drop(columns=["clicked", "bought"]), y


# There is no `expected_failed_checks`: all checks of a binary classifier apply. That of arrays of
# other libraries skips itself, as SCIPY_ARRAY_API is not set. By its tags and parameters it has no
# checks of several classes and of sample weights, which it refuses, and of NaN, a missing value.
@parametrize_with_checks([ClickModel(settings=QUICK)])
def test_checks_of_scikit_learn(estimator, check) -> None:
    check(estimator)


def test_parameters_are_kept_as_they_are() -> None:
    settings = {"epochs": 3}
    model = ClickModel("spec.toml", model="deepfm", random_state=7, settings=settings)
    assert model.get_params()["settings"] is settings
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(model="dlrm").model == "dlrm"


def test_cross_validation_by_probabilities() -> None:
    X, y = features(1500)  # noqa: N806
    scores = cross_validate(
        ClickModel(settings=QUICK), X, y, cv=2, scoring=["roc_auc", "neg_log_loss"]
    )
    assert scores["test_roc_auc"].min() > 0.6
    assert scores["test_neg_log_loss"].min() > -0.69


def test_classes_are_those_of_y() -> None:
    X, y = features()  # noqa: N806
    model = ClickModel(settings=QUICK).fit(X, y)
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.feature_names_in_.tolist() == X.columns.tolist()
    probabilities = model.predict_proba(X)
    assert probabilities.sum(1) == pytest.approx(1)
    assert (model.predict(X) == model.classes_[probabilities.argmax(1)]).all()
    assert model.score(X, y) == np.mean(model.predict(X) == y) > 0.6
    assert model.predict_proba(X)[y == "yes", 1].mean() > probabilities[y == "no", 1].mean() + 0.1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_score_when_the_first_is_gone(copied) -> None:
    X, y = features()  # noqa: N806
    model = ClickModel(settings=QUICK).fit(X, y)
    expected, folder = model.predict_proba(X), model.folder_
    again = copied(copied(model))
    del model
    gc.collect()
    assert not folder.exists()
    assert np.array_equal(again.predict_proba(X), expected)


def test_an_estimator_that_is_not_fitted(tmp_path) -> None:
    for call in (lambda m: m.predict(clicks(5)), lambda m: m.save(tmp_path / "bundle")):
        with pytest.raises(NotFittedError):
            call(ClickModel())
