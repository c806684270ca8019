"""Extensions that were interrupted, damaged or are under way: what others see, and how they end."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.base.files.atomic import locked, write_json
from nvt_torchrec.etl.check.check_files import NOTE
from nvt_torchrec.etl.commands.check import check
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.stages import Stages
from nvt_torchrec.etl.state.output import EXTENDING_FILE
from nvt_torchrec.formats.etl_output import NAMES, PREVIOUS, SWITCH_FILE, EtlOutput
from tests.etl.extended import SMALL, add, content, copy_of, differences, refused, write_days
from tests.etl.findings import bad
from tests.etl.runs import failing, settings
from tests.mutations import flip_bit


def test_two_at_once(raw, output) -> None:
    with locked(output / EXTENDING_FILE, output):
        before = content(output)
        with pytest.raises(OutputError, match="another run is writing here"):
            add(output, raw / "day_4")
        assert differences(before, content(output)) == []
    assert add(output, raw / "day_4")["generation"] == 2


def _interrupted(raw: Path, output: Path) -> None:
    """Stop before the switch: all of the day is ready."""
    with failing("nvt_torchrec.etl.extend.extend.switch", OutputError("stop here")):
        add(output, raw / "day_4")


def test_another_command_after_an_interruption(raw, output, tmp_path: Path, caplog) -> None:
    before = content(output)
    _interrupted(raw, output)
    # every reader works
    EtlOutput(output).check_whole()
    findings = check(output)
    assert [one.kind for one in findings] == ["unfinished"]
    assert findings[0].severity == NOTE
    assert {name: data for name, data in content(output).items() if ".work" not in name} == {
        **before,
        EXTENDING_FILE: (output / EXTENDING_FILE).read_bytes(),
    }
    other = copy_of(output, tmp_path / "other")
    skipped, corrected = (copy_of(output, tmp_path / name) for name in ("skipped", "corrected"))
    resumed, restarted = (
        add(one, raw / "day_4", **options) and content(one)
        for one, options in ((output, {}), (other, {"restart": True}))
    )
    assert differences(resumed, restarted) == []
    write_days(tmp_path / "later", {4: 52, 5: 30})
    assert add(skipped, tmp_path / "later" / "day_5", days={5})["days"]["valid"] == [5]
    with caplog.at_level(logging.WARNING):
        assert add(corrected, tmp_path / "later" / "day_4")["by_day"]["4"]["rows"] == 52
    assert "settings or inputs differ from those of the interrupted extension" in caplog.text


def test_an_input_that_changes_meanwhile(raw, output, tmp_path: Path, monkeypatch) -> None:
    shutil.copy(raw / "day_4", tmp_path)
    count_and_encode = Stages.count_and_encode

    def change(self, *arguments):
        results = count_and_encode(self, *arguments)
        os.utime(tmp_path / "day_4", (1, 1))
        return results

    monkeypatch.setattr(Stages, "count_and_encode", change)
    with pytest.raises(OutputError, match=r"modified: .* before"):
        add(output, tmp_path / "day_4")


def test_between_two_generations(raw, output) -> None:
    """Nothing reads it, and extend goes on, whatever it is asked for."""
    _interrupt_switch(raw, output)
    for read in (
        lambda: check(output),
        EtlOutput(output).check_whole,
        lambda: run(settings(raw, output, SMALL)),
    ):
        with pytest.raises(BadInputError, match=r"switch to a new generation(.|\n)*--resume"):
            read()
    assert add(output, raw / "day_4", restart=True)["generation"] == 2
    assert bad(output) == []


def test_work_that_is_elsewhere(raw, output, tmp_path: Path) -> None:
    """It is refused before anything is done: at the end it could not be renamed into OUT."""
    (tmp_path / "scratch").mkdir()
    (output / ".work").symlink_to(tmp_path / "scratch")
    refused(output, raw / "day_4", r"\.work: a link(.|\n)*remove", OutputError)
    assert not list((tmp_path / "scratch").iterdir())
    (output / ".work").unlink()
    (output / PREVIOUS).rename(tmp_path / "gone")
    (output / PREVIOUS).symlink_to(tmp_path / "nowhere")
    assert add(output, raw / "day_4")["generation"] == 2
    assert bad(output) == []


def test_a_state_that_is_damaged_within_a_switch(raw, output) -> None:
    _interrupt_switch(raw, output)
    (state,) = output.glob(".work/*/next/extension/state.json")
    flip_bit(state, 200)
    for _ in range(2):
        with pytest.raises(BadInputError, match=r"state\.json: not the file that was written"):
            add(output, "", resume=True)
    assert (output / SWITCH_FILE).exists()


def test_a_damaged_record_of_the_switch(raw, output, tmp_path: Path) -> None:
    """Also one that was planted: nothing outside of the output is written or removed."""
    _interrupt_switch(raw, output)
    (state,) = (path.name for path in (output / ".work").iterdir())
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    (output / ".work" / "01234567").symlink_to(victim)
    names = [name for name in NAMES if name != "rejected"]
    header = {"format": "nvt-torchrec switch", "format_version": 2, "undo": False}
    for record, match in (
        ({}, "not the record of a switch"),
        ({**header, "generation": 2, "state": "../victim", "names": names}, "is not inside"),
        ({**header, "generation": 2, "state": "01234567", "names": names}, "is not inside"),
        ({**header, "generation": 7, "state": state, "names": names}, "generation 7 is missing"),
    ):
        write_json(output / SWITCH_FILE, record)
        with pytest.raises(BadInputError, match=match):
            add(output, raw / "day_4")
    assert [path.name for path in victim.iterdir()] == ["precious"]


def _interrupt_switch(raw: Path, output: Path) -> None:
    """Fail at a rename of the switch, as if the disk were gone."""
    rename, broken = "nvt_torchrec.etl.extend.claim._rename", OSError(5, "Input/output error")
    with failing(rename, broken, after=3, expected=OutputError):
        add(output, raw / "day_4")
