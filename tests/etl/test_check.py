"""``python -m etl check``: nothing on a sound output; each planted damage is one finding."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.check.check_files import WARNING
from nvt_torchrec.etl.commands import check as check_module
from nvt_torchrec.etl.commands.check import check
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.state.output import UNFINISHED_FILE
from nvt_torchrec.etl.units.part_files import PartWriter
from nvt_torchrec.formats.schema import TableSchema
from tests.etl.findings import bad, only
from tests.etl.runs import change_json, settings
from tests.logs import write_log
from tests.mutations import flip_bit

SPLIT = Path("criteo_binary") / "split"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("check")
    write_log(directory / "raw", [120, 90, 101])
    run(settings(directory / "raw", directory / "out"))
    return directory / "out"


@pytest.fixture
def output(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    copy = tmp_path / "out"
    shutil.copytree(sound, copy)
    return copy


def write_part(table: pa.Table, path: Path) -> None:
    with PartWriter(path) as part:
        part.write(table)


def test_a_sound_output(sound: Path, capsys) -> None:
    assert main(["check", str(sound)]) == 0
    assert capsys.readouterr().out == f"{sound}: no problems found\n"
    rows: list[int] = []
    check(sound, workers=3, report=lambda n, total: rows.append(n) or rows.append(-total))
    assert sum(n for n in rows if n > 0) == 311
    assert {-n for n in rows if n < 0} == {311}


def test_command_line(output: Path, capsys) -> None:
    (output / SPLIT / "valid" / ".merlin" / "schema.json").unlink()
    assert main(["check", str(output), "--workers", "1"]) == 1
    shown = capsys.readouterr().out
    assert "error: " in shown
    assert ".merlin/schema.json: missing" in shown
    assert "1 errors, 0 warnings" in shown
    assert main(["check", str(output / "nowhere")]) == 2
    assert main(["check", str(output), "--workers", "0"]) == 2
    (output / "empty").mkdir()
    with pytest.raises(BadInputError, match=r"no manifest\.json"):
        check(output / "empty")


def test_many_findings_alike_are_counted(output: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(check_module, "_MAX_SHOWN", 2)
    for i in range(5):
        shutil.copy(
            output / SPLIT / "train" / "part.0.parquet", output / SPLIT / f"test/{i}.parquet"
        )
    assert main(["check", str(output)]) == 1
    shown = capsys.readouterr().out
    assert shown.count("not in the manifest") == 2
    assert "parts: 3 more findings like these" in shown


def test_page_checksums(output: Path) -> None:
    """One bit of a page: the values would be other ones, and nothing else would tell."""
    part = output / SPLIT / "train" / "part.0.parquet"
    column = pq.read_metadata(part).row_group(0).column(20)
    begin = column.dictionary_page_offset or column.data_page_offset
    flip_bit(part, begin + column.total_compressed_size - 1)
    assert "train/part.0.parquet: cannot be read" in only(output, "data")


def test_footer(output: Path) -> None:
    part = output / SPLIT / "train" / "part.0.parquet"
    content = part.read_bytes()
    flip_bit(part, len(content) - 40)
    assert "its footer was changed" in only(output, "parts")
    part.write_bytes(content[:-50])
    assert f"bytes instead of {len(content)}" in only(output, "parts")
    part.unlink()
    os.mkfifo(part)
    assert "0 bytes instead of" in only(output, "parts")


def test_schema(output: Path) -> None:
    schema = TableSchema.read(output / SPLIT)
    sizes = (schema.table_sizes[0] + 1, *schema.table_sizes[1:])
    changed = TableSchema(schema.label, schema.dense, schema.categorical, sizes)
    changed.write(output / SPLIT / "test")
    assert "not the file that was written" in only(output, "descriptions")
    shutil.rmtree(output / SPLIT / "test" / ".merlin")
    assert "missing" in only(output, "descriptions")


def test_rows_and_files_against_the_manifest(output: Path) -> None:
    split = output / SPLIT / "train"
    whole = pq.read_table(split / "part.0.parquet")
    write_part(whole.slice(1), split / "part.0.parquet")
    found = "\n".join(bad(output))
    assert "train/part.0.parquet: " in found
    assert "bytes instead of" in found
    write_part(whole, split / "part.0.parquet")
    assert bad(output) == []

    shutil.copy(split / "part.0.parquet", split / "part.9.parquet")
    found = "\n".join(bad(output))
    assert "train/part.9.parquet: not in the manifest" in found
    (split / "part.9.parquet").unlink()

    (split / "part.1.parquet").unlink()
    found = "\n".join(bad(output))
    assert "train/part.1.parquet: missing, but listed in the manifest" in found


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda value: value.update(workflow_digest="0" * 64), "the manifest says 000000000000…"),
        (lambda value: value.update(format_version=99), "format version 99"),
        (lambda value: value.pop("files"), "damaged: files is missing"),
        (lambda value: value["files"][0].update(bytes=5), "bytes instead of 5"),
        (lambda value: value.pop("splits"), "damaged: splits is missing"),
        (lambda value: value.update(split={"by": []}), ""),  # nothing needs it here
    ],
)
def test_the_manifest_itself(output: Path, change, what: str) -> None:
    change_json(output / "manifest.json", change)
    found = bad(output)
    assert len(found) == bool(what), found
    assert what in "".join(found)


def test_unfinished_and_leftovers(output: Path) -> None:
    (output / ".work").mkdir()
    assert "left by a run" in only(output, "leftover", WARNING)
    shutil.rmtree(output / ".work")
    (output / UNFINISHED_FILE).touch()
    assert "the run has not finished -> finish it with the same command" in only(
        output, "unfinished"
    )
    shutil.rmtree(output / "criteo_binary")
    shutil.rmtree(output / "workflow")
    (output / "manifest.json").unlink()
    only(output, "unfinished")


def test_workflow(output: Path) -> None:
    workflow = output / "workflow"
    description = next(iter(sorted(workflow.rglob("unique.cat_0.parquet"))))
    flip_bit(description)
    assert "not the file that was written" in only(output, "workflow")
    flip_bit(description)
    assert bad(output) == []
    compiled = max((workflow / "compiled").glob("*.npy"), key=lambda path: path.stat().st_size)
    flip_bit(compiled, -1)
    assert "workflow/compiled" in only(output, "workflow")
    shutil.rmtree(workflow)
    assert "missing" in only(output, "workflow")
