"""Directories that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.base.files.atomic import new_directory, remove_temporary


def test_files_and_names_are_durable_before_the_directory_appears(tmp_path: Path, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(str(path.relative_to(tmp_path)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with new_directory(tmp_path / "made") as temporary:
        (temporary / "a" / "b").mkdir(parents=True)
        (temporary / "a" / "b" / "file").write_text("x")
        name = temporary.name
    assert synced[-1] == "."
    assert {f"{name}{path}" for path in ("", "/a", "/a/b", "/a/b/file")} == set(synced[:-1])
    assert (tmp_path / "made" / "a" / "b" / "file").read_text() == "x"


def test_nothing_is_left_after_an_error(tmp_path: Path):
    message = "No space left on device\n  -> free space, or choose a writable place$"

    def write() -> None:
        with new_directory(tmp_path / "made") as temporary:
            (temporary / "file").write_text("x")
            raise OSError(28, os.strerror(28))

    with pytest.raises(OutputError, match=message):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_kept(tmp_path: Path):
    (tmp_path / "made").mkdir()
    with pytest.raises(OutputError, match="made exists"), new_directory(tmp_path / "made"):
        raise AssertionError("not reached")
    assert (tmp_path / "made").is_dir()


def test_files_and_directories_of_processes_that_were_killed_are_deleted(tmp_path: Path):
    """Below any directory, also within each other; what has another name stays."""
    (tmp_path / "a/.480.tmp/inside").mkdir(parents=True)
    for name in ("a/.480.tmp/inside/offsets.npy", "a/.480.tmp/.x.1.tmp", "a/.y.tmp", "a/z.tmp"):
        (tmp_path / name).write_text("x")
    (tmp_path / "a/.link.tmp").symlink_to(tmp_path)
    remove_temporary(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "z.tmp"]
