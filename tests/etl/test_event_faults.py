"""Events whose state is damaged or a stranger's, and runs that fail while they are made."""

from __future__ import annotations

import dataclasses
import errno
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.etl.events import partitions
from nvt_torchrec.etl.events.earlier_days import EarlierDays
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.inference.encoder import Encoder
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.event_kernels import find_newest
from tests.etl.event_logs import (
    BY_TIME,
    DAY,
    make_rows,
    spec_of,
    write,
)
from tests.etl.extended import content, differences
from tests.etl.findings import bad
from tests.etl.runs import OF_THE_RUN, change_json, failing


@pytest.mark.parametrize("name", ["0.keys.npy", "1.sums.npy", "state.json"])
def test_a_damaged_state_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "log.csv", make_rows(100, 3))
    spec = spec_of(tmp_path, BY_TIME, "")
    run(EtlSettings(str(tmp_path / "log.csv"), tmp_path / "out", spec, engine="cpu"))
    file = tmp_path / "out/workflow/events" / name
    for damage in (b"", file.read_bytes()[:-8], pickle.dumps([1, 2])):
        file.write_bytes(damage)
        with pytest.raises(BadInputError, match="workflow/events") as caught:
            Encoder.load(tmp_path / "out/workflow", check=True)
        assert caught.value.remedy
    file.unlink()
    with pytest.raises(BadInputError, match="workflow/events"):
        Encoder.load(tmp_path / "out/workflow")


@pytest.mark.parametrize("name", ["recent.offsets.npy", "recent.ids.npy"])
def test_a_state_of_a_stranger_leads_to_no_other_memory(
    tmp_path: Path, name: str, event_outputs: tuple[Path, Path]
) -> None:
    """Events that are not there, and ids outside of their table, where no digest is compared."""
    workflow = tmp_path / "workflow"
    shutil.copytree(event_outputs[1] / "workflow", workflow)
    array = np.load(workflow / "events" / name)
    row = {"user": "u1", "item": "i1", "price": 1.0, "shop": 2}
    for value in (-5, 2**30):
        damaged = array.copy()
        damaged[..., 1:] = value
        np.save(workflow / "events" / name, damaged)
        with pytest.raises(BadInputError, match="history recent: damaged"):
            Encoder.load(workflow).encode([row])


def test_a_million_late_events_are_passed_over_at_once() -> None:
    """The newest event before a row's time is sought by halves: 10^11 steps would not end."""
    rows, late = 100_000, 10**6
    known = np.concatenate([[1, 2], np.full(late, 10**15)])
    ends, counts = np.zeros((2, rows), np.int64)
    keys, offsets = np.array([5]), np.array([0, len(known)])
    cuts = np.full(rows, 10)
    assert find_newest(keys, offsets, known, np.full(rows, 5), cuts, 50, ends, counts)
    assert set(ends.tolist()) == set(counts.tolist()) == {2}


@pytest.mark.parametrize("name", ["events.0.npy", "events.hours.npy"])
def test_events_of_earlier_days_of_another_shape_are_refused(
    tmp_path: Path, name: str, event_outputs: tuple[Path, Path]
) -> None:
    """Also where all digests are right."""
    extension, spec = tmp_path / "extension", inspect(event_outputs[1] / "workflow").spec
    shutil.copytree(event_outputs[1] / "extension", extension)
    EarlierDays.read(extension, spec)
    np.save(extension / name, np.load(extension / name)[:-1])
    entry = FileEntry.from_file(extension / name).to_dict()
    change_json(extension / "events.json", lambda value: value["files"].update({name: entry}))
    with pytest.raises(BadInputError, match=rf"{name} has \d+ rows, not \d+") as caught:
        EarlierDays.read(extension, spec)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("function", "after"),
    [
        ("nvt_torchrec.etl.events.extract.write_array", 3),
        ("nvt_torchrec.etl.events.running_sums._sum_rows", 1),
        ("nvt_torchrec.etl.events.partitions.write_records", 2),
        ("nvt_torchrec.etl.events.partitioned_sums.sum_partition", 3),
        ("nvt_torchrec.etl.events.prepare.add_hours", 0),
        ("nvt_torchrec.etl.events.history_store.write_records", 1),
        ("nvt_torchrec.etl.events.history_store.sort_by_key", 2),
        ("nvt_torchrec.etl.events.prepare.write_event_state", 0),
        ("nvt_torchrec.etl.stages.write_json", 0),
        ("nvt_torchrec.etl.finish.accounting.pq.read_metadata", 2),
    ],
)
def test_a_run_that_fails_anywhere_goes_on_to_the_same_bytes(
    tmp_path: Path,
    function: str,
    after: int,
    event_outputs: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partitions, "PARTITION_EVENTS", 20)
    log, done = event_outputs
    spec = load_spec(log.parent / "spec.toml")
    error = OSError(errno.EIO, "Input/output error")
    output = tmp_path / "out"
    settings = EtlSettings(str(log), output, spec, engine="cpu", workers=1)
    with failing(function, error, after=after, expected=Exception):
        run(settings)
    run(settings)
    assert {*differences(content(done), content(output))} <= OF_THE_RUN


def test_an_extension_that_fails_anywhere_goes_on_to_the_same_bytes(
    tmp_path: Path, event_outputs: tuple[Path, Path]
) -> None:
    day = tmp_path / "day_3.csv"
    write(day, [dataclasses.replace(row, time=row.time + 3 * DAY) for row in make_rows(150, 1)])
    clean, failed = tmp_path / "clean", tmp_path / "failed"
    for output in (clean, failed):
        shutil.copytree(event_outputs[1], output)
    extend(ExtendSettings(clean, str(day), engine="cpu"))
    error = OSError(errno.EIO, "Input/output error")
    for function in (
        "nvt_torchrec.etl.events.prepare.add_hours",
        "nvt_torchrec.etl.events.prepare.write_event_state",
        "nvt_torchrec.etl.extend.extend.link_histories",
        "nvt_torchrec.etl.extend.claim._rename",
    ):
        with failing(function, error, expected=Exception):
            extend(ExtendSettings(failed, str(day), engine="cpu"))
    extend(ExtendSettings(failed, str(day), engine="cpu"))
    assert {*differences(content(clean), content(failed))} <= OF_THE_RUN
    assert bad(failed) == []
    extend(ExtendSettings(failed, undo=True, engine="cpu"))
    changed = differences(content(event_outputs[1]), content(failed))
    assert [n for n in changed if n.startswith(("criteo_binary", "workflow", "extension"))] == []
