"""Exports of derived columns: the ids of the compiled workflow, from tensors of the sources."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvt_torchrec import workflows
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.clicklog.derive.columns import derive, log_square
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.spec.limits import LARGEST_FLOAT32
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.reading import CROSS_SEPARATOR, Derivation, Reading
from nvt_torchrec.inference import Predictor
from nvt_torchrec.inference.export.derived import LogSquare, TimePart, _steps
from nvt_torchrec.inference.export.network import RawModel
from nvt_torchrec.inference.export.probe import probe_rows
from nvt_torchrec.inference.export.sources import MISSING, to_inputs
from nvt_torchrec.inference.export.torch_package import export_torch
from nvt_torchrec.inference.model.bundle import save_bundle
from nvt_torchrec.inference.model.weights import ModelShape, from_scorer
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.description import inspect
from tests.inference.reference import make_scorer
from tests.inference.test_export import run_bare
from tests.workflows.test_compiled import vocabulary_of

_TIMES = {"seconds": "epoch_s", "millis": "epoch_ms", "hour_text": "%y%m%d%H", "iso": ""}
_BOUNDARIES = (-3.5, 0.0, 18.0, 40.25, 1e9)
_PARTS = ["hour", "weekday", "day", "month"]
_POLICIES = [
    {},
    {"freq_threshold": 2},
    {"max_table_size": 9, "num_buckets": 3},
    {"hash_buckets": 5},
]


@st.composite
def derived_specs(draw: st.DrawFn) -> FeatureSpec:
    """Features of times, numbers, integers and crosses, several from one column of the log."""
    dense, categorical = [], []
    for name in draw(st.lists(st.sampled_from(["count", "price"]), unique=True)):
        raw = "int32" if name == "count" else "float"
        nulls = draw(st.sampled_from([(), ("-1",)]))
        dense.append(DenseColumn(name, raw=raw, reading=Reading(nulls=nulls)))
    for _ in range(draw(st.integers(0, 2))):
        one = draw(st.sampled_from(list(_TIMES)))
        two = draw(st.booleans())
        how = Derivation("age", _TIMES[one], "" if two else "2024-02-29 12:30:00.25")
        sources = (one, f"{one}_2") if two else (one,)
        dense.append(
            DenseColumn(f"d{len(dense)}", raw="float", reading=Reading(sources), derive=how)
        )
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from([*_PARTS, "bucket", "log_square", "cross", "plain"]))
        policy = draw(st.sampled_from(_POLICIES)) if kind != "cross" else {}
        time = draw(st.sampled_from(list(_TIMES)))
        number = draw(st.sampled_from(["count", "price"]))
        how: Derivation | None = Derivation(kind) if kind in ("log_square", "cross") else None
        reading, raw = Reading((number,), draw(st.sampled_from([(), ("-1",)]))), "int"
        if kind in _PARTS:
            how, reading = Derivation(kind, _TIMES[time]), Reading((time,))
        elif kind == "bucket":
            how = Derivation(kind, boundaries=_BOUNDARIES)
        elif kind == "cross":
            reading, raw = Reading(("a", draw(st.sampled_from(["b", "count"])))), "string"
        elif kind == "plain":
            reading = Reading((draw(st.sampled_from(["a", "count"])),))
        name = f"c{len(categorical)}"
        column = CategoricalColumn(name, raw=raw, reading=reading, derive=how, **policy)
        categorical.append(column)
    return FeatureSpec("label", tuple(dense), tuple(categorical))


def _vocabulary(column: CategoricalColumn, rng: np.random.Generator) -> list:
    if column.raw == "string":
        pairs = {tuple(rng.integers(-3, 6, 2).tolist()) for _ in range(rng.integers(0, 30))}
        return sorted(f"{one}{CROSS_SEPARATOR}{two}" for one, two in pairs)
    return np.flatnonzero(rng.random(60) < rng.choice([0.0, 0.5, 1.0])).tolist()


def untrained(directory: Path, spec: FeatureSpec, seed: int) -> Predictor:
    """A bundle of a workflow of derived columns, with random weights."""
    rng = np.random.default_rng(seed)
    fitted = {
        name: vocabulary_of(
            [] if columns[0].hash_buckets else _vocabulary(columns[0], rng), columns[0], rng
        )
        for name, columns in spec.vocabularies.items()
    }
    statistics = {name: {"mean": 1.5, "std": 2.0} for name in spec.dense_names}
    workflows.write_workflow(directory / "workflow", spec, workflows.Fitted(statistics, fitted))
    workflow = compiled.load(directory / "workflow")
    scorer, config = make_scorer(workflow.schema, seed)
    shape = ModelShape(config.dense, config.categorical, config.num_embeddings, workflow.digest)
    model = from_scorer(scorer, config)
    save_bundle(directory / "bundle", directory / "workflow", model, shape)
    return Predictor(workflow, model)


def _rows(spec: FeatureSpec, count: int, rng: np.random.Generator) -> list[dict]:
    reads = spec.read_plan(label=False).reads

    def value(name: str):
        if rng.random() < 0.15:
            return None
        base = name.removesuffix("_2")
        if base in _TIMES:
            moment = datetime.datetime(1969, 1, 1) + datetime.timedelta(
                days=int(rng.integers(0, 36_000)), seconds=int(rng.integers(86_400))
            )
            if base in ("iso", "hour_text"):
                return moment.strftime(_TIMES[base]) if _TIMES[base] else str(moment)
            seconds = (moment - datetime.datetime(1970, 1, 1)) // datetime.timedelta(seconds=1)
            return seconds * (1000 if base == "millis" else 1)
        only_float = all(read.raw == "float" for read in reads if read.source == name)
        if name == "price" and only_float:
            edges = np.array([*_BOUNDARIES, *_steps()[[0, 5, 100]], 1.5, -2.5, 2.0])
            edge = rng.choice(edges)
            return float(rng.choice([edge, np.nextafter(edge, np.inf), np.nextafter(edge, -1e9)]))
        number = int(rng.choice([-1, 0, 1, 2, 3, 4, 5, 18, 40, 41, 2**31 - 1, -(2**31)]))
        text = {read.raw for read in reads if read.source == name} & {"string"}
        return str(number) if text else number

    return [{name: value(name) for name in spec.sources(label=False)} for _ in range(count)]


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=derived_specs(), seed=st.integers(0, 2**31), count=st.integers(1, 40))
def test_ids_and_scores_are_those_of_the_workflow(
    spec: FeatureSpec, seed: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("any")
    predictor = untrained(directory, spec, seed)
    network = RawModel(inspect(directory / "workflow"), directory / "workflow", predictor.model)
    some = _rows(spec, count, np.random.default_rng(seed))
    for rows in (some, probe_rows(directory / "workflow", count, seed)):
        expected = predictor.workflow.transform(predictor.read(rows))
        inputs = to_inputs(rows, spec)
        with torch.no_grad():
            dense, ids = network.encode(*inputs)
            scores = network(*inputs).numpy()
        assert [column.tolist() for column in ids] == [column.tolist() for column in expected.ids]
        np.testing.assert_array_equal(dense.numpy().T, expected.dense)
        np.testing.assert_allclose(scores, predictor.predict(rows), atol=1e-6)


@settings(deadline=None, max_examples=300)
@given(st.integers(int(RAW_TYPES["time"].least), int(RAW_TYPES["time"].most)))
def test_parts_of_any_time(time: int) -> None:
    for kind in _PARTS:
        values = np.array([time])
        expected = derive(Derivation(kind), [values], np.zeros(1, bool))
        assert TimePart(kind)(torch.from_numpy(values)).tolist() == expected.tolist(), kind


def test_parts_of_the_days_around_leap_days() -> None:
    day = datetime.timedelta(1) // datetime.timedelta(microseconds=1)
    days = np.arange(-750_000, 2_900_000, dtype=np.int64) * day - 1
    days = days[days >= int(RAW_TYPES["time"].least)][::7]
    for kind in ("day", "month"):
        expected = derive(Derivation(kind), [days], np.zeros(len(days), bool))
        assert torch.equal(TimePart(kind)(torch.from_numpy(days)), torch.from_numpy(expected))


def test_squares_of_logarithms_at_every_step() -> None:
    steps = _steps()
    near = [steps, np.nextafter(steps, 0), np.nextafter(steps, np.inf)]
    rng = np.random.default_rng(0)
    odd = [-LARGEST_FLOAT32, -(2.0**53), -1e17, -2.5, -0.5, -0.0, 0.0, 0.5, 1.0, 1.9, 2.0, 2.5]
    x = np.concatenate([*near, odd, 10 ** rng.uniform(-3, 38, 5000), np.arange(3.0, 3000)])
    x = x[x <= LARGEST_FLOAT32]
    assert LogSquare()(torch.from_numpy(x)).tolist() == log_square(x).tolist()


SPEC = FeatureSpec(
    "label",
    (
        DenseColumn("count", fill=3),
        DenseColumn(
            "days", raw="float", reading=Reading(("when",)),
            derive=Derivation("age", "%y%m%d%H", "2015-01-01"),
        ),
    ),
    (
        CategoricalColumn(
            "hour", raw="int", reading=Reading(("when",)), derive=Derivation("hour", "%y%m%d%H")
        ),
        CategoricalColumn(
            "size", raw="int", reading=Reading(("count",), nulls=("-1",)),
            derive=Derivation("log_square"),
        ),
        CategoricalColumn(
            "pair", raw="string", reading=Reading(("a", "b")), derive=Derivation("cross")
        ),
        CategoricalColumn("a", raw="int", multi_hot=False),
        CategoricalColumn("tags", raw="int", multi_hot=True),
    ),
)  # fmt: skip


def test_a_package_of_derived_columns(tmp_path: Path) -> None:
    predictor = untrained(tmp_path, SPEC, 7)
    export_torch(tmp_path / "bundle", tmp_path / "export")
    columns = json.loads((tmp_path / "export" / "columns.json").read_text())
    assert columns["dense"]["columns"] == ["count", "count"]  # of size, -1 is missing
    assert columns["categorical"]["columns"] == ["when", "a", "b", "a"]
    assert columns["lists"]["columns"] == ["tags"]
    assert columns["times"]["columns"] == ["when"]
    assert columns["features"] == {
        "dense": [["count"], ["size"]],
        "categorical": [["days", "hour"], ["pair"], ["pair"], ["a"]],
        "lists": [["tags"]],
    }
    # by hand, as columns.json says
    when = datetime.datetime(2014, 10, 30, 13, tzinfo=datetime.UTC)
    rows = [
        {"count": 7, "when": "14103013", "a": "1", "b": "2", "tags": [3, 4]},
        {"count": -1, "when": None, "a": "4", "b": None, "tags": []},
    ]
    hand = (
        torch.tensor([[7.0, 7.0], [-1.0, torch.nan]], dtype=torch.float64),
        torch.tensor(
            [[int(when.timestamp()) * 10**6, 1, 2, 1], [MISSING, 4, MISSING, 4]], dtype=torch.int64
        ),
        [torch.tensor([[3, 4], [MISSING, MISSING]])],
    )
    parts = [rows, *(probe_rows(tmp_path / "workflow", count, seed=count) for count in (1, 60))]
    inputs = [hand, *(to_inputs(part, SPEC) for part in parts[1:])]
    [got] = run_bare(tmp_path / "export", tmp_path, inputs, ["model.pt2"])
    for scores, part in zip(got, parts, strict=True):
        np.testing.assert_allclose(scores, predictor.predict(part), atol=1e-6)


@pytest.mark.parametrize(
    ("values", "policy", "message"),
    [
        (["u1\x1f7"], {}, r"column pair: a cross of texts, such as 'u1'"),
        (["01\x1f7"], {}, r"column pair: a cross of texts, such as '01'"),
        (["1\x1f9223372036854775808"], {}, "a cross of texts"),
        ([], {"hash_buckets": 4}, "hashed as texts: pair"),
    ],
)
def test_crosses_that_are_refused(tmp_path: Path, values: list, policy: dict, message: str) -> None:
    pair = dataclasses.replace(SPEC.categorical[2], **policy)
    spec = FeatureSpec("label", (), (pair, CategoricalColumn("a", raw="int")))
    rng = np.random.default_rng(0)
    fitted = {
        "pair": vocabulary_of(values, pair, rng),
        "a": vocabulary_of([1], spec.categorical[1], rng),
    }
    workflows.write_workflow(tmp_path, spec, workflows.Fitted({}, fitted))
    scorer, config = make_scorer(compiled.load(tmp_path).schema, 1)
    with pytest.raises(SettingsError, match=message):
        RawModel(inspect(tmp_path), tmp_path, from_scorer(scorer, config))
