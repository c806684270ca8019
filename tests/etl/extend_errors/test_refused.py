"""What cannot be added is refused with a remedy, and the output stays as it is."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import (
    BadInputError,
    BadRowError,
    ClickLogError,
    OutputError,
    SettingsError,
)
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.etl.state.output import EXTENDING_FILE
from nvt_torchrec.etl.state.run_record import content_digest
from nvt_torchrec.formats.etl_output import PREVIOUS, EtlOutput
from tests.etl.extended import (
    SMALL,
    add,
    content,
    copy_of,
    differences,
    make_base,
    refused,
    write_days,
)
from tests.etl.runs import change_json, settings
from tests.logs import write_day


def test_a_day_that_is_there(raw, output, tmp_path: Path, caplog) -> None:
    """A retry says so; another file of its name is refused."""
    before = content(output)
    for day in range(4):
        shutil.copy(raw / f"day_{day}", tmp_path)  # the same content at another time
    for path in (raw / "day_3", raw / "day_0", tmp_path):
        with caplog.at_level(logging.INFO):
            assert add(output, path)["generation"] == 1
        assert "has these days already" in caplog.text
        caplog.clear()
    assert differences(before, content(output)) == []
    write_days(tmp_path, {3: 41, 0: 41})
    refused(output, tmp_path / "day_3", r"has day 3 already.*\n.*--undo.*call it day_4")
    refused(output, tmp_path, "has day 3 already, from another file")
    refused(output, tmp_path / "day_0", r"has day 0 already, from another file.*\n  -> if this")
    assert add(output, raw, days={1, 4})["generation"] == 2


def test_a_copy_of_a_day(raw, output, tmp_path: Path, caplog) -> None:
    shutil.copy(raw / "day_2", tmp_path / "day_4")
    refused(output, tmp_path / "day_4", "the same content as .*/day_2, which was added before")
    assert add(output, tmp_path / "day_4", allow_repeated_day=True)["generation"] == 2
    shutil.copytree(raw, tmp_path / "raw")
    shutil.copy(raw / "day_0", tmp_path / "raw" / "day_1")
    make_base(tmp_path / "raw", tmp_path / "again")
    assert "raw/day_1 have the same content" in caplog.text


@pytest.mark.parametrize("rows", [7, 330])
def test_a_day_of_far_fewer_or_more_rows(raw, output, tmp_path: Path, rows: int) -> None:
    """Corrected, it is taken without another flag."""
    write_days(tmp_path, {4: 330})
    lines = (tmp_path / "day_4").read_text().splitlines(keepends=True)[:rows]
    (tmp_path / "day_4").write_text("".join(lines))
    match = r"about \d+ rows, but earlier days have 41 to 60"
    refused(output, tmp_path / "day_4", match)
    add(copy_of(output, tmp_path / "other"), raw / "day_4")
    assert add(output, tmp_path / "day_4", max_rows_factor=6.0)["generation"] == 2


def test_digests_of_samples(tmp_path: Path) -> None:
    """Of a large file 16 places are read."""

    def digest() -> str:
        file = tmp_path / "day_0"
        return content_digest(DayFile(0, str(file), file.stat().st_size, "day_0"))

    digests = set()
    for size, place in ((0, 0), (1, 0), (40 << 20, 0), (40 << 20, 38 << 20)):
        with open(tmp_path / "day_0", "wb") as file:
            file.truncate(size)
        digests.add(digest())
        if size:
            with open(tmp_path / "day_0", "rb+") as file:
                file.seek(place)
                file.write(b"x")
            digests.add(digest())
    assert len(digests) == 6


def test_a_file_without_a_day_in_its_name(raw, output, tmp_path: Path) -> None:
    """The first remedy is to give it one, also where the newest day is day 0 as well."""
    shutil.copy(raw / "day_4", tmp_path / "clicks.tsv")
    no_number = r"clicks\.tsv: no number or date in its name, so it is day 0; .* has day 0 already"
    advice = r".*\n  -> if this is a later day, call it day_{}; if it replaces .*/{}, {}"
    again = advice.format(4, "day_0", "run the ETL again")
    refused(output, tmp_path / "clicks.tsv", no_number + again)
    (tmp_path / "new").mkdir()
    shutil.copy(raw / "day_0", tmp_path / "new" / "log.tsv")
    one_file = tmp_path / "one"
    run(settings(tmp_path / "new" / "log.tsv", one_file, SMALL))
    undo = advice.format(1, r"log\.tsv", "take that one back with `python -m etl extend --undo`")
    refused(one_file, tmp_path / "clicks.tsv", no_number + undo)


def test_an_older_day(tmp_path: Path) -> None:
    write_days(tmp_path / "raw", {5: 40, 6: 40, 8: 30})
    output = tmp_path / "out"
    run(settings(tmp_path / "raw", output, SMALL, days=frozenset({6, 8})))
    refused(output, tmp_path / "raw" / "day_5", "day 5 is older than the newest day of .*, 8")


def test_a_gap(raw, output, tmp_path: Path) -> None:
    """It is refused, unless the day is named."""
    directory = tmp_path / "raw"
    write_days(directory, {5: 40, 6: 40})
    for path in (directory, directory / "day_6"):
        refused(output, path, "missing day_4.*\n.*--days")
    manifest = add(output, directory / "day_6", days={6})
    assert manifest["days"]["valid"] == [6]


def test_other_columns(output, tmp_path: Path) -> None:
    write_day(tmp_path / "day_4", [["1", "2", "3"]] * 9)
    refused(output, tmp_path / "day_4", "3 tab-separated fields", BadRowError)
    write_day(tmp_path / "day_4", [["1", "2", "3", "zz", "b", "c", "d"]] * 9)
    refused(output, tmp_path / "day_4", r"day_4, line 1: column cat_0: 'zz'", BadRowError)
    # corrected: what was refused before left nothing behind
    write_days(tmp_path, {4: 52})
    assert add(output, tmp_path / "day_4", resume=False)["generation"] == 2


def test_too_many_bad_rows(raw, output, tmp_path: Path) -> None:
    """They can be looked at; then more are allowed, or the day is discarded."""
    shutil.copy(raw / "day_4", tmp_path)
    with open(tmp_path / "day_4", "a") as file:
        file.write("bad\n" * 4)
    before = content(output)
    with pytest.raises(BadRowError, match=r"4 of 56 rows.*\n.*line 53") as caught:
        add(output, tmp_path / "day_4", on_bad_rows="quarantine")
    (listed,) = output.glob(".work/*/next/rejected/day_4.tsv")
    assert str(listed.parent) in caught.value.remedy
    EtlOutput(output).check_whole()
    after = {name: data for name, data in content(output).items() if ".work" not in name}
    assert differences(before, after) == [EXTENDING_FILE]
    manifest = add(output, tmp_path / "day_4", on_bad_rows="quarantine", max_bad_fraction=0.1)
    assert manifest["rows"]["rejected"] == 4


def test_too_few_rows(output, tmp_path: Path) -> None:
    write_days(tmp_path, {4: 30})
    text = (tmp_path / "day_4").read_text().splitlines(keepends=True)
    (tmp_path / "day_4").write_text(text[0])
    refused(output, tmp_path / "day_4", "none left for test")


def test_settings_that_contradict_each_other(output) -> None:
    def make(**options) -> ExtendSettings:
        return ExtendSettings(output_path=output, input_path="raw", **options)

    with pytest.raises(SettingsError, match="--engine cpu and --scheduler"):
        make(engine="cpu", scheduler="tcp://localhost:1")
    with pytest.raises(SettingsError, match="keep_days 1"):
        make(keep_days=1)


def test_no_run(raw, tmp_path: Path) -> None:
    for name in ("nothing", "empty"):
        with pytest.raises(BadInputError, match=r"no finished run.*\n.*etl run"):
            add(tmp_path / name, raw / "day_3")
        (tmp_path / "empty").mkdir(exist_ok=True)
    assert not list(tmp_path.rglob(EXTENDING_FILE))


def test_a_run_that_did_not_finish(raw, output, tmp_path: Path) -> None:
    (output / ".unfinished").write_text("")
    manifest = (output / "manifest.json").read_bytes()
    (output / "manifest.json").unlink()
    with pytest.raises(OutputError, match=r"a run that did not finish\n.*etl run`"):
        add(output, raw / "day_4")
    # killed after its last file, it is finished
    (output / "manifest.json").write_bytes(manifest)
    assert add(output, raw / "day_4")["generation"] == 2
    assert not (output / ".unfinished").exists()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda output: shutil.rmtree(output / "extension"), "state.json: missing"),
        (
            lambda output: change_json(output / "extension/state.json", lambda v: v.pop("day")),
            "damaged",
        ),
        (
            lambda output: (output / "criteo_binary/split/train/part.1.parquet").unlink(),
            r"train/part.1.parquet: cannot be read",
        ),
        (
            lambda output: (output / "criteo_binary/split/train/part.1.parquet").write_text("x"),
            r"part.1.parquet: 1 bytes instead of",
        ),
        (
            lambda output: change_json(
                output / "manifest.json", lambda value: value.update(workflow_digest="0" * 64)
            ),
            "the data were made with workflow 000000000000…",
        ),
    ],
)
def test_a_damaged_output(raw, output, damage, match: str) -> None:
    damage(output)
    before = content(output)
    with pytest.raises(ClickLogError, match=match) as caught:
        add(output, raw / "day_4")
    assert caught.value.remedy
    after = {name: data for name, data in content(output).items() if ".work" not in name}
    assert set(differences(before, after)) <= {EXTENDING_FILE}


def test_a_manifest_that_names_files_elsewhere(raw, output) -> None:
    for name in ("../../../victim", "/etc/passwd", "train/../../x.parquet"):
        change_json(
            output / "manifest.json", lambda value, name=name: value["files"][0].update(file=name)
        )
        refused(output, raw / "day_4", "not the name of a part")


def test_nothing_to_undo(raw, output, tmp_path: Path) -> None:
    before = add(output, "", undo=True)
    assert before["generation"] == 0
    refused(output, "", "the generation before generation 0 is missing", undo=True)
    add(output, raw / "day_3")
    (tmp_path / "elsewhere").mkdir()
    (output / PREVIOUS).rename(tmp_path / "elsewhere" / PREVIOUS)
    (output / PREVIOUS).symlink_to(tmp_path / "elsewhere" / PREVIOUS)
    refused(output, "", "is not inside", undo=True)
    with pytest.raises(SettingsError, match="--input_path is missing"):
        add(output, "")
    with pytest.raises(SettingsError, match="are both set"):
        add(output, raw / "day_4", undo=True)
