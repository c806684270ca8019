"""Errors that say nothing against a checkpoint: it is neither called damaged nor passed over."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

from nvt_torchrec.base.errors import BadInputError, ClickLogError
from nvt_torchrec.dlrm.checkpoint import store as checkpoint
from nvt_torchrec.dlrm.checkpoint.store import load_model
from nvt_torchrec.dlrm.checkpoint.writer import finished
from tests.dlrm.resuming import flags_of
from tests.dlrm.runs import torchrun, train_here


def _no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _stale(file: Path, *arguments: object) -> bytes:
    if file.name == "schema.json":  # of the data
        return file.read_bytes()
    raise OSError(errno.ESTALE, "Stale file handle", str(file))


@pytest.mark.parametrize(
    ("where", "fails"),
    [
        ("nvt_torchrec.base.files.artifact._digest", _stale),
        ("nvt_torchrec.base.files.atomic.read_regular", _stale),
        ("nvt_torchrec.dlrm.checkpoint.tensors.read_chunk", _no_memory),
    ],
)
def test_a_resume_renames_nothing(data, started, monkeypatch, where, fails):
    steps = started / "steps"
    before = sorted(path.name for path in steps.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(where, fails, raising=False)
        with pytest.raises(ClickLogError, match=r"cannot be read now.*(Stale|out of memory)") as e:
            train_here(*flags_of(data, started), "--resume")
    assert not isinstance(e.value, BadInputError)
    assert sorted(path.name for path in steps.iterdir()) == before


def test_too_little_memory_is_not_called_damage(started, tmp_path, monkeypatch):
    path = shutil.copytree(finished(started / "steps")[-1], tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "Scorer", _no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            load_model(path)
    monkeypatch.setattr("nvt_torchrec.dlrm.checkpoint.tensors.read_chunk", _no_memory)
    with pytest.raises(ClickLogError, match="cannot be read now: CUDA out of memory"):
        load_model(path)


def test_an_error_of_one_rank_is_raised_on_all(data, started, tmp_path):
    """Else the others would wait for it until the launcher ends them."""
    newest = finished(started / "steps")[-1]
    places = tmp_path / "places"
    places.mkdir()
    flags = [*flags_of(data, started, batch_size=16), "--resume"]
    result = torchrun("tests/dlrm/one_rank_fails.py", str(places), *flags, timeout=800)
    assert result.returncode == 0, result.stderr
    expected = [
        f"ClickLogError: {places}: cannot be read now: [Errno 5] Input/output error",
        "BadInputError: gone",
        "SettingsError: another batch size",
        f"RuntimeError: {newest}: KeyError: 'epoch'",
        f"ClickLogError: {newest}: cannot be read now: CUDA out of memory",
        f"RuntimeError: {newest}: RuntimeError: size mismatch",
    ]
    for rank in "01":
        assert (places / rank).read_text().splitlines() == expected
    assert newest.exists()
