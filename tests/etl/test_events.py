"""Aggregates of what happened before a row, against a loop over all pairs of rows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.base.errors import BadInputError, BadRowError, OutputError, SettingsError
from nvt_torchrec.clicklog.in_memory.frames import read_columns
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.etl.engines import host, kept_rows
from nvt_torchrec.etl.events import extract, partitions, timeline
from nvt_torchrec.etl.events.label_rates import LabelRates, fit_smoothing
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.bulk import predict_file
from nvt_torchrec.inference.encoder import Encoder
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.scorer import Scorer
from nvt_torchrec.inference.server.protocol import parse_tensors
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.description import inspect
from tests.etl.event_logs import (
    BY_DAYS,
    BY_TIME,
    DAY,
    HOUR,
    Row,
    assert_lists,
    expected,
    expected_lists,
    frame_of,
    make_rows,
    parquet,
    read_lists,
    spec_of,
    transformed,
    write,
)
from tests.etl.extended import content, differences
from tests.etl.findings import bad
from tests.inference.serving import request_of
from tests.training.runs import train_here

EVENTS = {
    "at once": "",
    "an hour later": 'known = "1h"',
    "as they arrive": 'from = "arrived"',
    "by the day": 'cut = "day"\nknown = "1h"',
}


@pytest.mark.parametrize("events", EVENTS.values(), ids=EVENTS)
def test_aggregates_are_of_strictly_earlier_events(
    tmp_path: Path, events: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "CHUNK_ROWS", 40)  # several partitions
    monkeypatch.setattr(partitions, "PARTITION_EVENTS", 50)
    rows = make_rows(300, 3)
    (tmp_path / "log").mkdir()
    write(tmp_path / "log/day_0.csv", rows[:170])  # a file ends anywhere
    write(tmp_path / "log/day_1.csv", rows[170:])
    spec = spec_of(tmp_path, BY_TIME, events)
    run(EtlSettings(str(tmp_path / "log"), tmp_path / "out", spec, engine="cpu"))
    ordered = sorted(rows, key=lambda row: row.time)
    valid_from, test_from = ordered[len(rows) * 6 // 10].time, ordered[len(rows) * 8 // 10].time
    values = expected(rows, events)
    sides = [(row.time >= valid_from) + (row.time >= test_from) for row in rows]
    for number, split in enumerate(("train", "valid", "test")):
        there = parquet(tmp_path / "out", split)
        wanted = [value for value, side in zip(values, sides, strict=True) if side == number]
        for name in values[0]:
            made = transformed(tmp_path / "out", wanted, name)
            np.testing.assert_allclose(there[name], made, rtol=1e-5, atol=1e-5, err_msg=name)
        of_split = {
            name: [value for value, side in zip(of_rows, sides, strict=True) if side == number]
            for name, of_rows in expected_lists(rows, events).items()
        }
        assert_lists(tmp_path / "out", split, of_split)
    # mean and deviation are those of the training rows
    since = np.array(
        [value["user_since"] for value, side in zip(values, sides, strict=True) if not side]
    )
    statistics = inspect(tmp_path / "out/workflow").statistics["user_since"]
    filled = np.log1p(np.where(np.isnan(since), 10 * 365 * DAY, since))
    assert statistics["mean"] == pytest.approx(filled.mean())
    assert statistics["std"] == pytest.approx(filled.std(ddof=1))


def test_workers_and_blocks_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dask_client
) -> None:
    monkeypatch.setattr(timeline, "CHUNK_ROWS", 64)
    monkeypatch.setattr(partitions, "PARTITION_EVENTS", 50)
    rows = make_rows(400, 2, seed=1)
    for name, cuts in {"one": [0, 250, 400], "many": [0, 7, 120, 250, 300, 400]}.items():
        (tmp_path / name).mkdir()
        for day, (begin, end) in enumerate(itertools.pairwise(cuts)):
            write(tmp_path / name / f"day_{day}.csv", rows[begin:end])
    spec = spec_of(tmp_path, BY_TIME, 'known = "1h"')
    threads = {"engine": "cpu", "workers": 1}, {"engine": "cpu", "workers": 3}
    dask = {"engine": "dask", "scheduler": dask_client.scheduler.address}
    outputs = [tmp_path / f"out{number}" for number in range(3)]
    for output, options in zip(outputs, (*threads, dask), strict=True):
        run(EtlSettings(str(tmp_path / "one"), output, spec, **options))
    first, *others = (
        {n: d for n, d in content(output).items() if not n.startswith(("report", "timings", "man"))}
        for output in outputs
    )
    assert "workflow/events/state.json" in first
    for other in others:
        assert differences(first, other) == []
    run(EtlSettings(str(tmp_path / "many"), tmp_path / "many/out", spec, engine="cpu"))
    for split in SPLITS:
        one, many = parquet(outputs[0], split), parquet(tmp_path / "many/out", split)
        for name in one:
            np.testing.assert_array_equal(one[name], many[name])


def test_days_that_are_added_give_the_values_of_a_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a window that reaches into the days before, and of events that are known late."""
    monkeypatch.setattr(timeline, "CHUNK_ROWS", 64)
    monkeypatch.setattr(partitions, "PARTITION_EVENTS", 50)
    rows = make_rows(500, 5, seed=2)
    for name, days in {"all": 5, "first": 2}.items():
        (tmp_path / name).mkdir()
        for day in range(days):
            write(tmp_path / name / f"day_{day}.csv", [r for r in rows if r.time // DAY == day])
    spec = spec_of(tmp_path, BY_DAYS, 'from = "arrived"')
    run(EtlSettings(str(tmp_path / "all"), tmp_path / "once", spec, engine="cpu"))
    output = tmp_path / "out"
    run(EtlSettings(str(tmp_path / "first"), output, spec, engine="cpu"))
    for day in (2, 3, 4):
        extend(ExtendSettings(output, str(tmp_path / f"all/day_{day}.csv"), engine="cpu"))
    values = expected(rows, 'from = "arrived"')
    last = [value for value, row in zip(values, rows, strict=True) if row.time // DAY == 4]
    there = [parquet(output, split) for split in ("valid", "test")]
    for name in values[0]:
        made = transformed(output, last, name)
        both = np.concatenate([part[name] for part in there])
        np.testing.assert_allclose(both, made, rtol=1e-5, atol=1e-5, err_msg=name)
    lists = {
        name: [value for value, row in zip(of_rows, rows, strict=True) if row.time // DAY == 4]
        for name, of_rows in expected_lists(rows, 'from = "arrived"').items()
    }
    half = len(there[0]["price"])
    assert_lists(output, "valid", {name: values[:half] for name, values in lists.items()})
    assert_lists(output, "test", {name: values[half:] for name, values in lists.items()})
    assert bad(output) == []  # digests of the stores of the days before are taken over
    # what is kept is enough: the state for inference is that of the run at once
    once, day_by_day = (
        compiled.load(path / "workflow").events.compute_aggregates(hashes_of(spec, rows))
        for path in (tmp_path / "once", output)
    )
    places = [j for j, column in enumerate(spec.aggregates) if "rate" not in column.name]
    np.testing.assert_array_equal(once[places], day_by_day[places])
    late = [dataclasses.replace(row, time=4 * DAY + 7) for row in rows[:100]]
    write(tmp_path / "day_5.csv", late)
    with pytest.raises(BadInputError, match="older than rows of earlier days"):
        extend(ExtendSettings(output, str(tmp_path / "day_5.csv"), engine="cpu"))


def hashes_of(spec: FeatureSpec, rows: list[Row]) -> np.ndarray:
    frame = {"user": [r.user or None for r in rows], "item": [r.item for r in rows]}
    frame |= {"price": [0.0] * len(rows), "shop": [1] * len(rows)}
    groups = read_columns(pd.DataFrame(frame), spec).groups
    assert groups is not None
    return groups


def test_a_morning_scores_a_day_as_the_etl_writes_it(tmp_path: Path) -> None:
    """With cut = "day", raw rows alone get the values that the next day's ETL writes for them."""
    rows = make_rows(400, 5, seed=3)
    (tmp_path / "log").mkdir()
    for day in range(5):
        write(tmp_path / f"log/day_{day}.csv", [r for r in rows if r.time // DAY == day])
    spec = spec_of(tmp_path, BY_DAYS, 'cut = "day"\nknown = "1h"')
    output = tmp_path / "out"
    run(EtlSettings(str(tmp_path / "log"), output, spec, days=frozenset({0, 1}), engine="cpu"))
    for day in (2, 3, 4):
        of_day = [row for row in rows if row.time // DAY == day]
        encoder = Encoder.load(output / "workflow")  # of this morning
        frame = frame_of(of_day)
        dense, ids = encoder.encode(frame)
        dicts, ids_of_dicts = encoder.encode(frame.to_dict("records"))
        assert torch.equal(dense, dicts)
        assert torch.equal(ids.values(), ids_of_dicts.values())
        extend(ExtendSettings(output, str(tmp_path / f"log/day_{day}.csv"), engine="cpu"))
        there = [parquet(output, split) for split in ("valid", "test")]
        for name, column in zip(spec.dense_names, dense.T, strict=True):
            written = np.concatenate([part[name] for part in there])
            np.testing.assert_array_equal(written, column.numpy(), err_msg=name)
        for feature in ("recent.item", "recent.shop", "liked.item"):
            written = [ids for split in SPLITS[1:] for ids in read_lists(output, split)[feature]]
            looked_up = [row.tolist() for row in ids[feature].to_dense()]
            assert looked_up == [row[-50:] for row in written]


@pytest.mark.usefixtures("warm_trials")
def test_a_bundle_scores_raw_rows_as_those_that_the_next_day_writes(tmp_path: Path, caplog) -> None:
    """From the log to a score: aggregates and histories by the bundle's own state."""
    rows = make_rows(500, 4, seed=5)
    (tmp_path / "log").mkdir()
    for day in range(4):
        write(tmp_path / f"log/day_{day}.csv", [r for r in rows if r.time // DAY == day])
    spec, output = spec_of(tmp_path, BY_DAYS, 'cut = "day"'), tmp_path / "out"
    run(EtlSettings(str(tmp_path / "log"), output, spec, days=frozenset({0, 1, 2}), engine="cpu"))
    splits, checkpoint = output / "criteo_binary/split", tmp_path / "checkpoint"
    paths = f"--binary_path={splits}", f"--save_checkpoint_path={checkpoint}"
    train_here(*paths, "--adagrad", "--batch_size=32", "--epochs=1", "--no-boosted_trees")
    bundle = tmp_path / "bundle"
    assert write_bundle(output / "workflow", checkpoint, bundle)
    assert not write_bundle(output / "workflow", checkpoint, bundle)
    scores = Predictor.load(bundle).predict(frame_of([r for r in rows if r.time // DAY == 3]))
    predict_file(Predictor.load(bundle), str(tmp_path / "log/day_2.csv"), tmp_path / "scores")
    assert re.search(r"until \S+ \d\d:\d\d:\d\d: .* metrics are too good", caplog.text)
    scorer = Scorer.load(bundle)
    sizes = dict(zip(scorer.schema.categorical, scorer.schema.table_sizes, strict=True))
    before = tmp_path / "before"
    shutil.copytree(output, before)
    header, *lines = (tmp_path / "log/day_3.csv").read_text().split()
    lines = [line.rpartition(",")[0] + "," for line in lines]  # without a new value
    (tmp_path / "day_3.csv").write_text("\n".join([header, *lines, ""]))
    extend(ExtendSettings(output, str(tmp_path / "log/day_3.csv"), engine="cpu"))
    expected_scores = []
    for batch in itertools.chain(*(KJTLoader(splits / s, 64, device="cpu") for s in SPLITS[1:])):
        ids, keys = batch.sparse_features, batch.sparse_features.keys()
        known = [  # values that are new on day 3 are out of vocabulary for the model
            torch.where(ids[key].values() < sizes[key.rpartition(".")[2]], ids[key].values(), 2)
            for key in keys
        ]
        ids = KeyedJaggedTensor(keys, torch.cat(known), lengths=ids.lengths())
        expected_scores.append(scorer.predict(batch.dense_features, ids))
    np.testing.assert_allclose(scores, np.concatenate(expected_scores), atol=1e-6)
    # numbers of the caller, one for all rows, by tensors as by names
    predictor, more = Predictor.load(bundle), {"user_count": 3.0, "user_since": None}
    rows = [{"user": "u1", "item": item, "price": 1.0, "shop": 2} for item in ("i1", "i2")]
    wanted = predictor.predict(rows, more)
    assert np.abs(wanted - predictor.predict(rows)).min() > 1e-6
    tensors = to_tensors(list_inputs(predictor.spec), rows)
    tensors |= {"user_count": np.array([3.0]), "user_since": np.array([math.nan])}
    body = bytearray(json.dumps(request_of(tensors)).encode())
    read, _ = parse_tensors(body, {}, predictor, ServerSettings())
    np.testing.assert_array_equal(predictor.predict_encoded(read.dense, read.ids)[:, 0], wanted)
    with pytest.raises(InvalidRowError, match="column item: 5: expected a string"):
        predictor.predict([{**rows[0], "item": 5}])  # a key is read as the column of its name
    # what is known of the keys changes by the day, even if no value is new
    file = bundle / "workflow/events/0.sums.npy"
    changed = tmp_path / "workflow"
    shutil.copytree(bundle / "workflow", changed)
    (changed / "events/0.sums.npy").write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(OutputError, match="not a bundle of this workflow"):
        write_bundle(changed, checkpoint, bundle)
    extend(ExtendSettings(before, str(tmp_path / "day_3.csv"), engine="cpu"))
    assert write_bundle(before / "workflow", checkpoint, tmp_path / "newer")
    assert inspect(bundle / "workflow").digest == inspect(before / "workflow").digest
    for made, status in ((tmp_path / "newer", 0), (bundle, 3)):
        assert main(["publish", str(made), "--to", str(tmp_path / "served")]) == status


def test_the_smoothing_is_that_of_simulated_keys() -> None:
    """Rates of keys from a Beta distribution of a known weight."""
    random = np.random.default_rng(0)
    n = random.integers(1, 40, 20_000)
    clicks = random.binomial(n, random.beta(0.2 * 25, 0.8 * 25, len(n))).astype(float)
    moments = np.array([len(n), n.sum(), (n * n).sum(), clicks.sum(), (clicks**2 / n).sum()])
    assert fit_smoothing(moments) == pytest.approx(25, rel=0.1)
    clicks = random.binomial(n, 0.2).astype(float)  # of one rate
    moments = np.array([len(n), n.sum(), (n * n).sum(), clicks.sum(), (clicks**2 / n).sum()])
    assert fit_smoothing(moments) > 500


def test_the_rate_of_all_events_is_of_those_before_alone() -> None:
    """No label of a later row is in it, and without an event there is none."""
    hours = np.array([[5, 7], [4, 2], [1, 2]])
    rates = LabelRates({}, hours, ("clicked",))
    times = np.array([5, 6, 7, 8, 9]) * HOUR * 10**6
    found = rates.find_prior("clicked", times + 17)
    np.testing.assert_array_equal(found, [np.nan, 0.25, 0.25, 0.5, 0.5])


@pytest.mark.parametrize(
    ("split", "events", "what"),
    [
        ('by = "share"\nvalid = 0.1\ntest = 0.1', "", "split by share, with [events]"),
        ('by = "column"\ncolumn = "item"\nvalid = 0.1\ntest = 0.1', "", "split by column"),
        (BY_TIME, 'known = "soon"', "known = 'soon'"),
        (BY_TIME, 'cut = "week"', "cut = 'week'"),
        (BY_TIME, '[[aggregate]]\nof = "user"\nvalues = "median"', "value = 'median'"),
        (BY_TIME, '[[aggregate]]\nof = "item"\nlabel = "bought"', "label = 'bought'"),
        (BY_TIME, "[[aggregate]]\nwindow = '1d'", "of = ('',)"),
        (BY_TIME, '[[history]]\nname = "a.b"\nof = "user"\ncolumns = "item"', "name = 'a.b'"),
        (BY_TIME, '[[history]]\nname = "a"\nof = "user"\ncolumns = "price"', "columns = "),
    ],
)
def test_specs_that_would_leak_or_mean_nothing(
    tmp_path: Path, split: str, events: str, what: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        spec_of(tmp_path, split, events)
    assert what in str(caught.value)
    assert caught.value.remedy


def test_a_row_without_a_time_is_malformed(tmp_path: Path) -> None:
    rows = make_rows(100, 3)
    log = tmp_path / "log.csv"
    write(log, rows)
    log.write_text(log.read_text() + ",u1,i1,1,0,5,1\n")
    split = BY_TIME.replace('column = "time"', 'column = "arrived"')
    spec = spec_of(tmp_path, split, "")
    with pytest.raises(
        BadRowError, match=r"column time: .*: the time of an event must not be missing"
    ):
        run(EtlSettings(str(log), tmp_path / "out", spec, engine="cpu"))


def test_blocks_that_are_counted_are_read_twice_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their events come out of the pass that counts; here none of their rows are kept."""
    monkeypatch.setattr(kept_rows, "MAX_BYTES", 0)
    blocks = []

    def read(block: Block, *arguments: Any, **options: Any) -> Iterator[RawRows]:
        blocks.append(block)
        return read_block_chunks(block, *arguments, **options)

    for module in (host, extract):
        monkeypatch.setattr(module, "read_block_chunks", read)
    write(tmp_path / "log.csv", make_rows(100, 1))
    spec = spec_of(tmp_path, BY_TIME, "")
    run(EtlSettings(str(tmp_path / "log.csv"), tmp_path / "out", spec, engine="cpu"))
    assert len(blocks) == 2 * len(set(blocks)) > 0


@pytest.mark.parametrize(
    ("column", "spellings", "given"),
    [
        ('raw = "hex32"', ["ab", "AB", "000000ab"], 0xAB),
        ('raw = "int"', ["7", "07", "007"], 7),
        ('raw = "bool"', ["true", "TRUE", "1"], True),
        ('raw = "string"\ntrim = true', ["a", " a", "a\t"], "a"),
        ('raw = "string"\nnulls = ["NA"]', ["NA", "", "NA"], None),
    ],
)
def test_keys_are_compared_by_their_values(
    tmp_path: Path, column: str, spellings: list[str], given: object
) -> None:
    """As ids are, whatever their text: in blocks that are counted, in others, and at inference."""
    spec = "[input]\nformat = 'csv'\n[label]\nname = 'y'\n[split]\nby = 'days'\n"
    spec += "[events]\ntime = 't'\ntime_format = 'epoch_s'\n[[aggregate]]\nof = 'ctx.u'\n"
    spec += "[[history]]\nname = 'past'\nof = 'ctx.u'\ncolumns = 'i'\n"
    spec += (
        "[[categorical]]\nnames = 'i'\nraw = 'int'\n[[categorical]]\nnames = 'u'\nfrom = 'ctx.u'\n"
    )
    (tmp_path / "spec.toml").write_text(spec + column)
    for day in range(2):
        rows = [f"{i % 2},{60 * i},{spellings[i % 3]},5" for i in range(20 * day, 20 * day + 20)]
        (tmp_path / f"day_{day}.csv").write_text("\n".join(["y,t,ctx.u,i", *rows, ""]))
    output = tmp_path / "out"
    run(EtlSettings(str(tmp_path), output, load_spec(tmp_path / "spec.toml"), engine="cpu"))
    known = given is not None
    lists = [values for split in SPLITS for values in read_lists(output, split)["past.i"]]
    assert list(map(len, lists)) == [known * row for row in range(40)]
    encoder = Encoder.load(output / "workflow")
    _, sparse = encoder.encode([{"t": None, "ctx": {"u": given}, "i": 5}])
    assert sparse["past.i"].lengths().tolist() == [known * 40]
