"""Files of sources that are wrong, changed or taken twice, and runs that are interrupted."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError, BadRowError, ClickLogError, SettingsError
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.inference.encoder import Encoder
from tests.etl.event_logs import BY_DAYS, BY_TIME
from tests.etl.findings import bad
from tests.etl.runs import QUARANTINE, failing, settings, tree
from tests.etl.source_logs import (
    DAY,
    Purchase,
    load_source_spec,
    make_bought,
    make_clicks,
    write_clicks,
    write_rows,
)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Two days, and the purchases of both."""
    folder = tmp_path / "raw"
    write_clicks(folder, make_clicks(100, 2, seed=1))
    write_rows(folder / "purchases.csv", make_bought(40, 0, 2, seed=2))
    return folder


@pytest.fixture
def spec(tmp_path: Path) -> FeatureSpec:
    return load_source_spec(tmp_path, BY_DAYS)


def append(path: Path, line: str) -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (",u1,1,2,3,a", "purchases.csv, line 42: column at: '': the time of an event must not be"),
        ("soon,u1,1,2,3,a", "purchases.csv, line 42: column at: 'soon'"),
        ("900,u1,1,much,3,a", "purchases.csv, line 42: column amount: 'much'"),
        ("900,u1,1,1e17,3,a", r"purchases.csv, line 42: column amount: '1e17'.* -2\^53"),
        ("900,u1,x1,2,3,a", "purchases.csv, line 42: column article: 'x1'"),
        ("900,u1", "purchases.csv, line 42"),
    ],
)
def test_a_wrong_event_is_named_or_left_out(
    tmp_path: Path, raw: Path, spec: FeatureSpec, line: str, message: str
) -> None:
    run(settings(raw, tmp_path / "whole", spec))
    append(raw / "purchases.csv", line)
    with pytest.raises(BadRowError, match=message):
        run(settings(raw, tmp_path / "strict", spec))
    run(settings(raw, tmp_path / "out", spec, **QUARANTINE))
    head, rejected = (tmp_path / "out/rejected/source.purchases.tsv").read_text().splitlines()
    assert head.split("\t") == ["file", "line", "reason", "raw"]
    assert rejected.split("\t")[1] == "42"
    assert rejected.endswith(line)
    for name in ("1.sums", "0.sums"):  # of the purchases, and of the clicks
        file = f"workflow/events/{name}.npy"
        np.testing.assert_array_equal(
            np.load(tmp_path / "out" / file), np.load(tmp_path / "whole" / file)
        )


def test_files_that_cannot_be_read(tmp_path: Path, raw: Path, spec: FeatureSpec) -> None:
    """Missing, empty, without a column, truncated, or no parquet at all: a sentence."""
    file = raw / "purchases.csv"
    text = file.read_text()
    (raw / "purchases.csv").unlink()
    with pytest.raises(BadInputError, match=r"source purchases: .*no such file"):
        run(settings(raw, tmp_path / "out", spec))
    file.write_text("")
    with pytest.raises(ClickLogError, match=r"purchases\.csv"):
        run(settings(raw, tmp_path / "out", spec))
    file.write_text(text.replace("amount", "price"))
    with pytest.raises(ClickLogError, match="amount"):
        run(settings(raw, tmp_path / "out", spec))
    file.unlink()
    write_rows(raw / "purchases.parquet", make_bought(40, 0, 2, seed=2))
    content = (raw / "purchases.parquet").read_bytes()
    for damaged in (content[:-20], b"PAR1" + content[4:40] + b"PAR1", content[::-1]):
        (raw / "purchases.parquet").write_bytes(damaged)
        with pytest.raises(ClickLogError, match=r"purchases\.parquet"):
            run(settings(raw, tmp_path / "out", spec))


def test_keys_that_the_log_does_not_have(tmp_path: Path, raw: Path, spec: FeatureSpec) -> None:
    """Else all values would be 0 or missing, at exit status 0."""
    bought = make_bought(40, 0, 2, seed=2)
    others = [dataclasses.replace(event, user_id=f"x{event.user_id}") for event in bought]
    write_rows(raw / "purchases.csv", others)
    with pytest.raises(SettingsError, match="source purchases: no row of the log has a key"):
        run(settings(raw, tmp_path / "out", spec))
    write_rows(raw / "purchases.csv", [])  # but there may be none
    run(settings(raw, tmp_path / "empty", spec))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('path = "purchases*"', 'path = "../purchases*"', "--table purchases=PATH"),
        ('path = "purchases*"', 'path = "/etc/passwd"', "--table purchases=PATH"),
        ('path = "purchases*"', 'path = "s3://bucket/a"', "--table purchases=PATH"),
        ('known = "20m"', 'known = "soon"', "known"),
        ('time = "at"', 'tim = "at"', "unknown key 'tim'"),
        ('name = "purchases"', 'name = "a b"', "letters, digits"),
        ('item = "article"}', 'shop = "article"}', "key names 'shop', which is no key of"),
        ('item = "article"}', 'item = "user_id"}', "list each column once"),
        ('"distinct(shop)", "since"]', '"distinct(item)"]', "name in the source, 'article'"),
        ('"distinct(shop)", "since"]', '"rate"]', "events of a source have no label"),
        ('source = "purchases"\nvalues = ["count", "min', 'source = "x"\nvalues = ["min', "'x'"),
    ],
)
def test_a_source_that_a_spec_may_not_name(
    tmp_path: Path, spec: FeatureSpec, old: str, new: str, message: str
) -> None:
    text = (tmp_path / "spec.toml").read_text()
    assert old in text
    (tmp_path / "spec.toml").write_text(text.replace(old, new))
    with pytest.raises(SettingsError, match=message):
        load_spec(tmp_path / "spec.toml")


def test_sources_and_tables_are_used_and_named_once(tmp_path: Path, spec: FeatureSpec) -> None:
    (rule,) = spec.event_sources
    unused = dataclasses.replace(rule, name="refunds")
    for sources, message in (
        ((rule, rule), "sources or tables of the same name: purchases"),
        ((rule, unused), "source refunds: no .* uses it"),
        ((), "add a .* with name = 'purchases'"),
    ):
        with pytest.raises(SettingsError, match=message):
            dataclasses.replace(spec, event_sources=sources)


def test_default_values_and_names_of_columns(tmp_path: Path) -> None:
    """Without values: those of events without a label. Columns say whose events they are of."""
    more = '[[aggregate]]\nof = "item"\nsource = "purchases"\nwindow = "7d"\n'
    spec = load_source_spec(tmp_path, BY_DAYS, more=more)
    names = [name for name in spec.dense_names if name.startswith("item_")]
    assert names == ["item_purchases_count_7d", "item_purchases_since"]
    assert "user_purchases_amount_sum" in spec.dense_names
    assert spec.to_dict()["event_sources"][0]["name"] == "purchases"
    plain = dataclasses.replace(
        spec, dense=spec.dense[:1], events=None, histories=(), event_sources=()
    )
    assert "event_sources" not in plain.to_dict()


def test_an_event_that_earlier_rows_would_have_counted(
    tmp_path: Path, raw: Path, spec: FeatureSpec
) -> None:
    """It came too late: what was written without it would be wrong. `known` has to cover that."""
    output, log = tmp_path / "out", make_clicks(150, 3, seed=1)
    newest = max(row.time for row in log if row.time < 2 * DAY)
    run(settings(raw, output, spec))
    write_clicks(tmp_path / "later", [row for row in log if row.time >= 2 * DAY])
    day, late = tmp_path / "later/day_2.csv", tmp_path / "late.csv"
    # known after 20 minutes: the first is known just when the newest row is written
    times = {"kept": newest - 1200, "late": newest - 1201}
    write_rows(late, [Purchase(time, "u1", "1", "5", "1", name) for name, time in times.items()])
    adding = ExtendSettings(output, str(day), table=(f"purchases={late}",), engine="cpu")
    with pytest.raises(BadRowError, match=r"late.csv, line 3: column at: .* is older than rows"):
        extend(adding)
    extend(dataclasses.replace(adding, on_bad_rows="quarantine", restart=True))
    rejected = (output / "rejected/source.purchases.tsv").read_text().splitlines()
    assert [row.split("\t")[1] for row in rejected] == ["line", "3"]


def test_a_file_counts_once(tmp_path: Path, raw: Path, spec: FeatureSpec) -> None:
    """The path of a spec names the files of all days; a file that was moved is the same one."""
    output = tmp_path / "out"
    log = make_clicks(150, 3, seed=1)
    run(settings(raw, output, spec))
    kept = (output / "extension/events.1.npy").read_bytes()
    write_clicks(raw, [row for row in log if row.time >= 2 * DAY])
    shutil.copy(raw / "purchases.csv", tmp_path / "copy.csv")
    adding = ExtendSettings(output, str(raw / "day_2.csv"), engine="cpu")
    for paths in ((), (f"purchases={tmp_path / 'copy.csv'}",)):
        extend(dataclasses.replace(adding, table=paths))
        assert len(np.load(output / "extension/events.1.npy")) > 0
        found = np.load(output / "extension/events.1.npy")[3].sum()
        assert found == np.load(output / ".previous/extension/events.1.npy")[3].sum()
        extend(ExtendSettings(output, undo=True))
        assert (output / "extension/events.1.npy").read_bytes() == kept
    append(raw / "purchases.csv", f"{3 * DAY},u1,1,2,3,a")
    with pytest.raises(BadInputError, match="was read with an earlier day, and has changed"):
        extend(adding)


def test_an_interrupted_run_and_an_interrupted_day(
    tmp_path: Path, raw: Path, spec: FeatureSpec
) -> None:
    """Each goes on with what it has, to the same bytes."""
    stop, output, whole = KeyboardInterrupt("ctrl-c"), tmp_path / "out", tmp_path / "whole"
    run(settings(raw, whole, spec))
    places = (
        "nvt_torchrec.etl.events.source_events.format_rejected",
        "nvt_torchrec.etl.stages.Stages.count_and_encode",
        "nvt_torchrec.etl.events.prepare.number_keys",
        "nvt_torchrec.etl.engines.host.write_units",
    )
    for place in places:
        with failing(place, stop):
            run(settings(raw, output, spec))
    run(settings(raw, output, spec))
    assert tree(output) == tree(whole)
    write_clicks(tmp_path / "later", make_clicks(150, 3, seed=1)[100:])
    write_rows(tmp_path / "later/purchases_2.csv", make_bought(20, 2, 3, seed=5))
    days = [ExtendSettings(out, str(tmp_path / "later/day_2.csv")) for out in (output, whole)]
    extend(days[1])
    for place in (*places[:2], "nvt_torchrec.etl.extend.extend.switch"):
        with failing(place, stop):
            extend(days[0])
    extend(ExtendSettings(output, resume=True))
    assert tree(output) == tree(whole)


def test_a_changed_file_is_another_run(tmp_path: Path, raw: Path, spec: FeatureSpec) -> None:
    with failing("nvt_torchrec.etl.engines.host.write_units", KeyboardInterrupt("ctrl-c")):
        run(settings(raw, tmp_path / "out", spec))
    append(raw / "purchases.csv", "900,u1,1,2,3,a")
    with pytest.raises(ClickLogError, match="tables"):
        run(settings(raw, tmp_path / "out", spec))
    run(settings(raw, tmp_path / "out", spec, restart=True))


@pytest.mark.parametrize("name", ["1.keys", "1.sums", "1.picks", "1.previous", "1.offsets"])
def test_a_damaged_state_is_refused(
    tmp_path: Path, raw: Path, spec: FeatureSpec, name: str
) -> None:
    run(settings(raw, tmp_path / "out", spec))
    file = tmp_path / f"out/workflow/events/{name}.npy"
    array = np.load(file)
    np.save(file, array[..., :-1])
    with pytest.raises(BadInputError, match=f"{name}.npy"):
        Encoder.load(tmp_path / "out/workflow")
    np.save(file, array[..., ::-1])
    assert any(f"{name}.npy" in finding for finding in bad(tmp_path / "out"))


def test_by_time_and_a_source_alone(tmp_path: Path, raw: Path) -> None:
    """A spec whose only events are those of a source; they are of all rows."""
    file = tmp_path / "alone.toml"
    file.write_text(
        '[input]\nformat = "csv"\n[label]\nname = "clicked"\n[split]\n'
        f'{BY_TIME}\n[events]\ntime = "time"\ntime_format = "epoch_s"\n'
        '[[source]]\nname = "purchases"\npath = "purchases.csv"\ntime = "at"\n'
        'time_format = "epoch_s"\n'
        '[[aggregate]]\nof = []\nsource = "purchases"\n[[categorical]]\nnames = "user"\n'
        'raw = "string"\n'
    )
    spec = load_spec(file)
    assert spec.dense_names == ["all_purchases_count", "all_purchases_since"]
    run(settings(raw, tmp_path / "out", spec))
    read = Encoder.load(tmp_path / "out/workflow").read([{"user": "u1", "time": 10 * DAY}])
    assert read.dense[0, 0] == 40
