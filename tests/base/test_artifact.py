"""Descriptions of files: format, version and digests are checked before anything is used."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes
from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.base.files.validation import resolve_inside
from tests.mutations import expect_own_errors


@dataclasses.dataclass(frozen=True)
class _Content:
    rows: int
    files: dict[str, FileEntry]


FORMAT = Format("test rows", 3, "a description of rows", digest_key="blake2b")


@pytest.fixture
def described(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(b"1234")
    entry = FileEntry.from_file(tmp_path / "data")
    file = tmp_path / "rows.json"
    FORMAT.write(file, {"rows": 4, "files": {"data": entry.to_dict()}})
    return file


def _edit(file: Path, *, sign: bool = True, **changes: object) -> None:
    value = {**json.loads(file.read_text()), **changes}
    if sign:
        value["blake2b"] = FORMAT.digest(value)
    file.write_text(json.dumps(value))


def test_what_is_written_is_read(described: Path) -> None:
    content = FORMAT.read(_Content, described, "copy it")
    assert content.rows == 4
    check_sizes(described.parent, content.files, "copy it")
    check_digests(described.parent, content.files, "copy it")


@pytest.mark.parametrize("damage", [b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000])
def test_what_is_no_json_has_the_remedy_of_the_file(described: Path, damage: bytes) -> None:
    described.write_bytes(damage)
    with pytest.raises(BadInputError, match="cannot be read as a description of rows") as caught:
        FORMAT.read(_Content, described, "copy it from the other machine")
    assert caught.value.remedy == "copy it from the other machine"


def test_other_formats_versions_and_digests(described: Path) -> None:
    def expect(error: type, message: str, **changes: object) -> None:
        whole = described.read_text()
        _edit(described, **changes)
        with pytest.raises(error, match=message):
            FORMAT.read(_Content, described, "copy it", other_version="use the other version")
        described.write_text(whole)

    expect(BadInputError, r"rows\.json: not a description of rows\n.*copy it", format="x")
    expect(SchemaError, "version 2, this program reads 3\n.*other version", format_version=2)
    expect(SchemaError, "version True, this program reads 3", format_version=True)
    expect(
        SchemaError, "reads 3; nvt-torchrec 9 wrote", format_version=4, versions={"nvt-torchrec": 9}
    )
    expect(BadInputError, "not what was written", rows=5, sign=False)
    expect(BadInputError, "damaged: rows: expected an integer, got 'x'", rows="x")
    expect(BadInputError, "damaged: a file has one digest", files={"data": {"bytes": 4}})
    expect_own_errors(
        described,
        lambda: FORMAT.read(_Content, described, "copy it"),
        rounds=150,
        after=lambda: None,
    )


@pytest.mark.parametrize(
    "name",
    [
        "../data",
        "/etc/passwd",
        "a/../../data",
        "link",
        "loop",
        "",
        ".",
        "x\0",
        "\ud800",
        "x" * 5000,
    ],
)
def test_files_lie_in_the_directory(described: Path, name: str) -> None:
    directory = described.parent / "inner"
    (directory / "a").mkdir(parents=True)
    (directory / "link").symlink_to(described.parent)
    (directory / "loop").symlink_to("loop")
    name = f"{name}/data" if name == "link" else name
    with pytest.raises(BadInputError, match=r"is not inside|missing\n.*copy it"):
        check_sizes(directory, {name: FileEntry(4, sha256="")}, "copy it")
    assert resolve_inside(directory, "a/none", described) == directory / "a" / "none"


def test_what_is_no_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    """It used to block for ever, or to fill the memory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 30)
    for name, what in (
        ("pipe", "not a regular"),
        ("device", "not a regular"),
        ("large", "at most"),
    ):
        with pytest.raises(BadInputError, match=f"cannot be read as a description.*{what}"):
            FORMAT.read(_Content, tmp_path / name, "copy it")
    with pytest.raises(OSError, match="not a regular file"):
        MappedArray(tmp_path / "pipe", float, 1)


def test_damaged_files(described: Path) -> None:
    directory = described.parent
    files = FORMAT.read(_Content, described, "copy it").files
    (directory / "data").write_bytes(b"1235")
    check_sizes(directory, files, "copy it")
    with pytest.raises(BadInputError, match=r"data: not the file that was written .*sha256"):
        check_digests(directory, files, "copy it")
    (directory / "data").write_bytes(b"12345")
    with pytest.raises(BadInputError, match="data: 5 bytes instead of 4"):
        check_sizes(directory, files, "copy it")
