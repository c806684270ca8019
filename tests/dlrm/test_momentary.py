"""Errors that say nothing against a checkpoint: it is neither called damaged nor passed over."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

from nvt_torchrec.base.errors import BadInputError, ClickLogError
from nvt_torchrec.dlrm.checkpoint import state
from nvt_torchrec.dlrm.checkpoint import store as checkpoint
from nvt_torchrec.dlrm.checkpoint.store import load_model
from nvt_torchrec.dlrm.checkpoint.writer import finished
from nvt_torchrec.dlrm.launch.distributed import process_group
from tests.dlrm.resuming import flags_of
from tests.dlrm.runs import train_here


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


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.EIO, "Input/output error"), "cannot be read now: .*Input/output error"),
        (torch.OutOfMemoryError("CUDA out of memory"), "cannot be read now: CUDA out of memory"),
        (BadInputError("gone"), "gone"),
        (KeyError("epoch"), "KeyError: 'epoch'"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(tmp_path, monkeypatch, error, raised):
    """Else the others would wait for it until the launcher ends them."""

    def fail() -> None:
        raise error

    sent = []
    with process_group() as group, monkeypatch.context() as patch:
        patch.setattr(state, "gathered", lambda group, mine: sent.append(mine) or [mine, None])
        with pytest.raises((ClickLogError, RuntimeError), match=raised):
            state.on_all_ranks(group, tmp_path, fail)
        patch.setattr(state, "gathered", lambda group, mine: [mine, *sent])  # another rank's
        with pytest.raises(type(sent[0]), match=raised):
            state.on_all_ranks(group, tmp_path, lambda: None)
