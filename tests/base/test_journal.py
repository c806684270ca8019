"""Journals: what is recorded stays, whatever is damaged or done again, and plans are compared."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.base.files.journal import Journal, list_changes, refuse_changes
from tests.mutations import mutated


@dataclasses.dataclass(frozen=True)
class _Record:
    rows: int


def _files(directory: Path) -> list[Path]:
    return sorted((directory / "units").iterdir())


def test_a_unit_that_is_done_again_takes_no_record_of_another(tmp_path: Path) -> None:
    """Units that were finished together have one file; redoing the first leaves the others."""
    journal = Journal(tmp_path)
    journal.add({"a": {"rows": "damaged"}, "b": {"rows": 2}})
    assert journal.read_finished(_Record) == {"b": _Record(2)}
    journal.add({"a": {"rows": 1}})
    assert Journal(tmp_path).read_finished(_Record) == {"a": _Record(1), "b": _Record(2)}
    journal.add({"a": {"rows": 5}})
    assert journal.read_finished(_Record)["a"] == _Record(5)


def test_damaged_records_are_units_that_are_not_finished(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add({"a": {"rows": 1}})
    journal.add({"b": {"rows": 2}})
    first, second = _files(tmp_path)
    value = json.loads(first.read_text())
    for seed in range(200):
        first.write_text(json.dumps(mutated(value, seed)))
        assert journal.read_finished(_Record)["b"] == _Record(2)
    for text in (b"", b"[" * 100_000, b"\xff", b'{"a": {"rows": 1}', b"[1]"):
        first.write_bytes(text)
        assert journal.read_finished(_Record) == {"b": _Record(2)}
    second.with_name(f".{second.name}.1.tmp").write_bytes(second.read_bytes())
    second.unlink()
    assert journal.read_finished(_Record) == {}


def test_records_that_cannot_be_read_now_are_an_error(tmp_path: Path, monkeypatch) -> None:
    """Their units may be finished: doing them again would waste hours."""
    journal = Journal(tmp_path)
    journal.add({"a": {"rows": 1}})

    def read(path: Path, maximum: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("nvt_torchrec.base.files.atomic.read_regular", read)
        with pytest.raises(BadInputError, match="Input/output error"):
            journal.read_finished(_Record)
    (file,) = _files(tmp_path)
    file.rename(tmp_path / "kept")
    (tmp_path / "units").rmdir()
    (tmp_path / "units").write_bytes(b"")
    with pytest.raises(BadInputError, match="cannot be listed"):
        journal.read_finished(_Record)


def test_a_new_plan_discards_the_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.read_plan(dict[str, int], "") is None
    journal.begin({"seed": 0})
    journal.add({"a": 1})
    journal.update({"seed": 1})
    assert journal.read_plan(dict[str, int], "") == {"seed": 1}
    assert journal.read_finished(int) == {"a": 1}
    journal.begin({"seed": 2})
    assert journal.read_finished(int) == {}
    (tmp_path / "plan.json").write_text('{"seed": "x"}')
    with pytest.raises(
        BadInputError,
        match=r"plan\.json: damaged: seed: expected an integer, got 'x'.*\n.*--restart",
    ):
        journal.read_plan(dict[str, int], "begin again with --restart")


def test_changes_are_listed_by_name(tmp_path: Path) -> None:
    before = {
        "settings": {"columns": [{"name": "a", "cap": 1}], "old": 1},
        "inputs": {"x": {"n": 1}},
    }
    now = {
        "settings": {"columns": [{"name": "a", "cap": 2}]},
        "inputs": {"x": {"n": 1}, "y": {"n": 3}},
    }
    assert list_changes(before, before) == []
    refuse_changes(before, before, tmp_path, "")
    assert list_changes(before, now) == [
        "columns.a.cap: 1 before, 2 now",
        "old: no longer there",
        "y: new",
    ]
    many = {"settings": {f"s{i}": i for i in range(10)}}
    other = {"settings": {f"s{i}": -1 for i in range(10)}}
    with pytest.raises(OutputError, match=r"begun with other settings(.|\n)*s7(.|\n)*and 2 more"):
        refuse_changes(many, other, tmp_path, "undo that")
