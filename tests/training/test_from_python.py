"""``train(TrainSettings(…))`` as a notebook calls it: twice, in threads, and leaving no trace."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.training import TrainResult, TrainSettings, train
from nvt_torchrec.training.launch.distributed import process_group
from tests.training.runs import ROOT


def settings_of(data: Path, path: Path) -> TrainSettings:
    return TrainSettings(
        binary_path=data,
        batch_size=32,
        epochs=1,
        embedding_dim=8,
        dense_arch_layer_sizes=(16, 8),
        over_arch_layer_sizes=(16, 1),
        boosted_trees=False,
        log_path=path / "log",
    )


def torch_state() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "random": torch.get_rng_state().tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "group": dist.is_initialized(),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
    }


def test_twice_in_threads_with_one_result(data, tmp_path):
    """Python handles signals in the main thread alone; PyTorch is left as it was."""
    torch.manual_seed(7)
    results: list[TrainResult] = []

    def run() -> None:
        results.append(train(settings_of(data, tmp_path / str(len(results)))))

    before = torch_state() | {"threads": 2}
    torch.set_num_threads(2)
    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    here = train(settings_of(data, tmp_path / "here"))
    assert torch_state() == before
    assert len(results) == 2, "each ended without an error"
    assert results[0].metrics == results[1].metrics == here.metrics
    assert here.metrics["test"]["samples"] == 201


def test_the_lines_of_the_docs(data, tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(from nvt_torchrec.training import .*?)```", text, re.DOTALL)
    (tmp_path / "OUT" / "criteo_binary").mkdir(parents=True)
    (tmp_path / "OUT" / "criteo_binary" / "split").symlink_to(data)
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    assert re.match(r"0\.\d+\n", capsys.readouterr().out)
    assert (tmp_path / "CKPT").is_dir()


def test_what_is_refused(data, tmp_path):
    with (
        process_group(),
        pytest.raises(SettingsError, match=r"has a process group .*\n.*destroy_process_group"),
    ):
        train(settings_of(data, tmp_path))
    with pytest.raises(SettingsError, match=r"plan_only: train\(\) trains"):
        train(TrainSettings(binary_path=data, plan_only=8))
