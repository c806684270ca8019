"""ClickModel on logs: what its folder holds, what frames it takes, and what it refuses."""

from __future__ import annotations

import json
import logging

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from nvt_torchrec import ClickModel, Predictor
from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError, SettingsError
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.estimator.fit_folder import FitFolder
from nvt_torchrec.estimator.fit_steps import choose_seed
from nvt_torchrec.etl.__main__ import main as etl
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.inference.__main__ import main as inference
from tests.test_examples import clicks

QUICK = {"epochs": 2, "boosted_trees": False}
SPEC = {
    "label": {"name": "clicked"},
    "split": {"by": "share", "valid": 0.1, "test": 0.1},
    "dense": [{"names": ["price"], "raw": "float"}],
    "categorical": [{"names": ["user", "item"], "raw": "string"}],
}


def log(rows: int = 600) -> pd.DataFrame:
    """A log with one outcome and no time, so that rows are split at random."""
    return clicks(rows).drop(columns=["time", "bought"])


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> ClickModel:
    folder = tmp_path_factory.mktemp("fit") / "folder"
    return ClickModel(folder=folder, settings=QUICK).fit(clicks(1500), label="clicked")


def test_the_folder_is_what_the_commands_write(fitted, tmp_path, capsys) -> None:
    """They go on with it: check the output, bundle the checkpoint again, score, show a lineage."""
    folder = FitFolder(fitted.folder_)
    assert all(page.is_file() for page in fitted.pages_.values())
    assert etl(["check", str(folder.output.root)]) == 0
    pair = ["--workflow", str(folder.output.workflow), "--checkpoint", str(folder.checkpoint)]
    assert inference(["bundle", *pair, "--output", str(folder.bundle)]) == 0
    assert "already made from this workflow and checkpoint" in capsys.readouterr().out
    scores = tmp_path / "scores.parquet"
    files = ["--input", str(folder.log), "--output", str(scores)]
    assert inference(["predict", "--bundle", str(folder.bundle), *files]) == 0
    expected = fitted.predict_proba(clicks(1500))[:, 1]
    assert pq.read_table(scores)["probability"].to_numpy() == pytest.approx(expected, abs=1e-6)


def test_metrics_are_those_of_the_training(fitted) -> None:
    events = (FitFolder(fitted.folder_).training_log / "metrics.jsonl").read_text().splitlines()
    last = next(e for e in map(json.loads, events) if e.get("split") == "test")
    assert fitted.metrics_["test"]["auroc"] == last["auroc"]
    assert "valid" in fitted.metrics_
    assert fitted.baselines_["test"]


def test_a_log_with_a_time_is_split_by_it(fitted) -> None:
    spec = FitFolder(fitted.folder_).spec.read_text()
    assert 'by = "time"' in spec
    assert "bought" not in fitted.predictor_.spec.feature_names  # an outcome
    assert fitted.feature_names_in_.tolist() == clicks(1).columns.drop("clicked").tolist()


def test_save_makes_a_bundle(fitted, tmp_path) -> None:
    fitted.save(tmp_path / "saved")
    rows = clicks(20)
    row = rows.drop(columns=["clicked", "bought"]).to_dict("records")[3]
    expected = fitted.predict_proba(rows)[3, 1]
    (score,) = Predictor.load(tmp_path / "saved", check=True).predict([row])
    assert score == pytest.approx(expected, rel=1e-6)  # one row is summed in another order
    with pytest.raises(OutputError, match="exists"):
        fitted.save(tmp_path / "saved")


class Stream:
    """What a frame of Polars is to Arrow."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def test_frames_of_all_kinds_give_the_same_model() -> None:
    frame = log()
    frame["category"] = frame["category"].astype("category")
    frame.index = frame.index[::-1] * 3
    table = pa.Table.from_pandas(frame, preserve_index=False)
    frames = {
        "pandas": frame,
        "arrow": table,
        "stream": Stream(table),
        "dict": {name: frame[name].to_numpy() for name in frame},
    }
    scores = [
        ClickModel(settings=QUICK).fit(rows, label="clicked").predict_proba(rows)
        for rows in frames.values()
    ]
    assert all(np.array_equal(scores[0], other) for other in scores[1:])


def test_a_frame_of_pandas_types_and_missing_values() -> None:
    frame = log().assign(
        small=pd.array([1, None, 3] * 200, dtype="Int8"),
        half=pd.Categorical([0.5, 1.5, None] * 200),
        member=pd.array([True, None, False] * 200, dtype="boolean"),
        words=[["x", "y"], None] * 300,
        seconds=pd.to_timedelta(np.arange(600), unit="s"),
    )
    frame.loc[::7, "user"] = None
    model = ClickModel(settings=QUICK).fit(frame, label="clicked")
    read = set(model.predictor_.spec.sources(label=False))
    assert {"user", "price", "small", "half", "member", "words"} <= read
    missing = pd.DataFrame({name: [None] for name in model.feature_names_in_})
    assert 0 < model.predict_proba(missing)[0, 1] < 1


def test_a_matrix_of_numbers_as_good_as_a_regression() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4000, 5))  # noqa: N806
    y = X @ [1, -0.5, 0.3, 0, 0] + X[:, 3] ** 2 + rng.logistic(size=4000) > 1
    X[rng.random(X.shape) < 0.05] = np.nan
    model = ClickModel().fit(X[:3000], y[:3000])
    regression = LogisticRegression().fit(np.nan_to_num(X[:3000]), y[:3000])
    ours = roc_auc_score(y[3000:], model.predict_proba(X[3000:])[:, 1])
    theirs = roc_auc_score(y[3000:], regression.predict_proba(np.nan_to_num(X[3000:]))[:, 1])
    assert ours > theirs + 0.03  # it finds the square


def test_a_log_of_ids_as_good_as_a_regression() -> None:
    frame = log(12_000)
    train, test = frame[:8000], frame[8000:]
    model = ClickModel().fit(train, label="clicked")
    ids = ["user", "item", "category"]
    encoder = make_column_transformer((OneHotEncoder(handle_unknown="ignore"), ids))
    regression = make_pipeline(encoder, LogisticRegression()).fit(train, train["clicked"])
    ours = roc_auc_score(test["clicked"], model.predict_proba(test)[:, 1])
    theirs = roc_auc_score(test["clicked"], regression.predict_proba(test)[:, 1])
    assert ours > theirs - 0.003


def test_a_spec_of_ones_own(tmp_path) -> None:
    """As a dict or a file; y takes the place of its label."""
    frame = log()
    path = tmp_path / "spec.toml"
    path.write_text(
        '[input]\nformat = "csv"\n[label]\nname = "clicked"\n'
        '[split]\nby = "share"\nvalid = 0.1\ntest = 0.1\n'
        '[[dense]]\nnames = ["price"]\nraw = "float"\n'
        '[[categorical]]\nnames = ["user", "item"]\nraw = "string"\n'
    )
    models = [
        ClickModel(SPEC, settings=QUICK).fit(frame),
        ClickModel(path, settings=QUICK).fit(frame, label="clicked"),
        ClickModel(SPEC, settings=QUICK).fit(frame.drop(columns="clicked"), frame["clicked"]),
    ]
    scores = [model.predict_proba(frame) for model in models]
    assert all(np.array_equal(scores[0], other) for other in scores[1:])
    assert models[0].predictor_.spec.feature_names == ["price", "user", "item"]


def test_shares_and_events_of_a_guess() -> None:
    model = ClickModel(valid=0.05, test=0.2, events=True, settings=QUICK)
    model.fit(clicks(2000), label="clicked")
    manifest = json.loads(FitFolder(model.folder_).output.manifest.read_text())
    assert manifest["split"]["by"] == "time"
    assert (model.metrics_["valid"]["samples"], model.metrics_["test"]["samples"]) == (100, 400)
    assert model.predictor_.spec.events.time == "time"


def test_labels_of_two_texts_are_read_by_the_guess() -> None:
    frame = log().assign(clicked=lambda f: f["clicked"].map({1: "yes", 0: "no"}))
    model = ClickModel(settings=QUICK).fit(frame, label="clicked")
    assert model.classes_.tolist() == [0, 1]
    likely = model.predict_proba(frame)[:, 1]
    assert likely[frame["clicked"] == "yes"].mean() > likely[frame["clicked"] == "no"].mean()


def test_columns_that_give_the_label_away(caplog) -> None:
    """They are left out of a log, with a warning; beside y, all columns are features."""
    frame = log()
    frame["paid"] = frame["clicked"] * 10 + np.arange(600) % 3
    with caplog.at_level(logging.WARNING):
        model = ClickModel(settings=QUICK).fit(frame, label="clicked")
    assert "paid: its values give clicked away" in caplog.text
    assert "paid" not in model.predictor_.spec.sources(label=False)
    model.fit(frame.drop(columns="clicked"), frame["clicked"])
    assert "paid" in model.predictor_.spec.sources(label=False)


def test_a_few_rows_have_both_labels_in_each_split() -> None:
    """By the seed that the spec then names: the ETL divides the rows as was computed."""
    labels = np.arange(40) % 8 == 0
    split = Split("share", 0.1, 0.1)
    seed = choose_seed(labels.astype(np.int64), split)
    assert seed > 0
    assert choose_seed(np.arange(4000) % 2, split) == 0
    X = {"x": np.random.default_rng(0).normal(size=40)}  # noqa: N806
    model = ClickModel(settings=QUICK).fit(X, labels)
    assert f"seed = {seed}\n" in FitFolder(model.folder_).spec.read_text()
    for split_name in ("valid", "test"):
        metrics = model.metrics_[split_name]
        assert 0 < metrics["positives"] < metrics["samples"]


def test_a_folder_is_used_again_unless_it_holds_something_else(tmp_path) -> None:
    model = ClickModel(folder=tmp_path / "fit", settings=QUICK)
    first = model.fit(log(), label="clicked").predict_proba(log())
    second = model.fit(log(400), label="clicked")
    assert FitFolder(second.folder_).output.manifest.exists()
    assert not np.array_equal(second.predict_proba(log()), first)
    (tmp_path / "fit" / "CKPT.1").mkdir()
    with pytest.raises(OutputError, match=r"no fit has written: CKPT\.1"):
        model.fit(log(), label="clicked")
    assert FitFolder(second.folder_).bundle.exists()


def test_a_day_is_added_to_the_folder(tmp_path) -> None:
    """By ``nvt-etl extend``, if the spec splits by days; a fit does not throw it away."""
    spec = SPEC | {"split": {"by": "days"}}
    model = ClickModel(spec, folder=tmp_path / "fit", settings=QUICK).fit(log(800))
    log(400).to_parquet(tmp_path / "day_1.parquet")
    output = str(FitFolder(model.folder_).output.root)
    day = str(tmp_path / "day_1.parquet")
    assert etl(["extend", "--output_path", output, "--input_path", day]) == 0
    with pytest.raises(OutputError, match="days added to"):
        model.fit(log(800))
    assert etl(["check", output]) == 0


def test_the_log_of_the_steps(capsys, monkeypatch) -> None:
    logger = logging.getLogger("nvt_torchrec")
    monkeypatch.setattr(logger, "propagate", False)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        ClickModel(verbose=1, settings=QUICK).fit(log(), label="clicked")
        shown = capsys.readouterr().err
        assert "the label is clicked" in shown
        assert "valid: AUROC" in shown
        ClickModel(settings=QUICK).fit(log(), label="clicked")
        assert "valid: AUROC" not in capsys.readouterr().err
        assert (logger.level, logger.handlers) == (logging.WARNING, [])
    finally:
        logger.setLevel(level)


STARS = {"name": "liked", "from": "stars", "threshold": 4}
RATINGS = log().assign(clicked=np.arange(600) % 5 + 1)


@pytest.mark.parametrize(
    ("fit", "error", "message"),
    [
        (lambda m: m.fit(log(), label="cliked"), SchemaError, "cliked.*did you mean 'clicked'"),
        (
            lambda m: m.fit(RATINGS, label="clicked"),
            InvalidRowError,
            "row 1, column clicked: 2: expected a label of 0 or 1.*give y",
        ),
        (
            lambda m: m.fit(log().replace({"clicked": {0: None}}), label="clicked"),
            InvalidRowError,
            "remove rows without a label",
        ),
        (lambda m: m.fit(log().assign(clicked=1), label="clicked"), ValueError, "one class, 1"),
        (lambda m: m.fit(log(), log()["clicked"]), SettingsError, "X has a column clicked"),
        (lambda m: m.fit(log(), np.arange(9) % 2), ValueError, "600 rows, and y has 9"),
        (lambda m: m.fit(log(), log()["clicked"], label="clicked"), SettingsError, "both given"),
        (lambda m: m.fit(log()[:2], label="clicked"), ValueError, "n_samples = 2"),
        (
            lambda m: m.fit(log().assign(x=[1, "a"] * 300), label="clicked"),
            SchemaError,
            "column x.*astype",
        ),
        (
            lambda m: m.set_params(spec=SPEC).fit(log(), label="bought"),
            SettingsError,
            "'bought' is not a label of the spec",
        ),
        (
            lambda m: m.set_params(spec=SPEC, valid=0.2).fit(log()),
            SettingsError,
            "valid given together with a spec",
        ),
        (lambda m: m.set_params(spec=SPEC).fit(log().drop(columns="user")), BadInputError, "user"),
        (
            lambda m: m.set_params(spec=SPEC | {"label": STARS}).fit(log(), log()["clicked"]),
            SettingsError,
            "y is given, but the spec derives liked from column stars",
        ),
        (
            lambda m: m.set_params(settings={"epoch": 1}).fit(log(), label="clicked"),
            SettingsError,
            "did you mean 'epochs'",
        ),
        (
            lambda m: m.set_params(settings={"seed": 1}).fit(log(), label="clicked"),
            SettingsError,
            "seed is set by fit",
        ),
    ],
)
def test_what_is_refused(fit, error, message) -> None:
    model = ClickModel(settings=QUICK)
    with pytest.raises(error, match=f"(?s){message}"):
        fit(model)
    assert not hasattr(model, "classes_")


def test_rows_that_cannot_be_scored(fitted) -> None:
    rows = clicks(10)
    with pytest.raises(SchemaError, match="no column item"):
        fitted.predict(rows.drop(columns="item"))
    with pytest.raises(InvalidRowError, match="row 0, column price"):
        fitted.predict(rows.assign(price="cheap"))
    with pytest.raises(ValueError, match="X has 2 features"):
        fitted.predict(np.zeros((3, 2)))
    assert fitted.predict_proba(rows[:0]).shape == (0, 2)
