"""Syncing beside the work: who waits for the disk, how often, and what may be noted when."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.base.files.atomic import atomic_path, deferred, publish, together, write_text
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.units.unit_plan import make_plan
from tests.etl.runs import settings
from tests.logs import CRITEO


def test_a_failure_leaves_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(KeyError), together():
        write_text(tmp_path / "a", "x")
        raise KeyError
    assert not list(tmp_path.iterdir())
    with deferred() as written:
        write_text(tmp_path / "a", "x")
        with suppress(KeyError), atomic_path(tmp_path / "b") as temporary:
            temporary.write_text("half")
            raise KeyError
        write_text(tmp_path / "c", "x")

    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"a: cannot be written: Disk quota exceeded"):
        publish(written)
    assert not list(tmp_path.iterdir())


def test_what_is_noted_is_durable(raw: Path, tmp_path: Path, monkeypatch) -> None:
    """By the sparest file system: a file's content and its name each last only if synced."""
    fsync, replace, unlink = os.fsync, os.replace, Path.unlink
    durable: set[Path] = set()
    content: set[Path] = set()
    named: dict[Path, set[Path]] = {}
    noted = []

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        content.add(path)
        durable.update(named.pop(path, set()))

    def renamed(source, target) -> None:
        source, target = Path(source), Path(target)
        if source.name.endswith(".tmp"):
            assert source in content, f"{target} is named before its content is durable"
        if target.parent.name == "units":
            units = set(json.loads(source.read_text()))
            noted.extend(units)
            missing = {unit for unit in units if target.parents[1] / "parts" / unit not in durable}
            assert not missing, f"noted before they are durable: {missing}"
        if target.name == "fit.json":
            files = {path for path in (tmp_path / "out" / "workflow").rglob("*") if path.is_file()}
            assert files <= durable
        replace(source, target)
        named.setdefault(target.parent, set()).add(target)

    def deleted(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".npz" and path.exists():
            begin, end = map(int, path.stem.split("-"))
            runs = [tuple(map(int, one.stem.split("-"))) for one in durable if one.suffix == ".npz"]
            assert any(b <= begin and end <= e and (b, e) != (begin, end) for b, e in runs)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(Path, "unlink", deleted)
    monkeypatch.setattr("nvt_torchrec.etl.engines.runs.FAN_IN", 2)
    plan = make_plan(find_days(str(raw)), CRITEO, block_bytes=1500)
    monkeypatch.setattr("nvt_torchrec.etl.stages.make_plan", lambda *args, **options: plan)
    run(settings(raw, tmp_path / "out", workers=2))
    assert sorted(noted) == sorted(unit.file for unit in plan.units)
