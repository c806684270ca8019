from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvt_torchrec.training.launch import distributed
from tests.nvt_loader.data import write_split
from tests.training.generations import write_output
from tests.training.runs import (
    adagrad_flags,
    early_flags,
    flags_of,
    train_here,
    train_many,
    train_until_pulled,
)

TABLE_SIZES = (10, 50, 200, 3)


@pytest.fixture(scope="package", autouse=True)
def elsewhere(tmp_path_factory):
    """Runs without --log_path write to the directory that they are started in.

    A rank has one thread, as those of other processes have, see ``warm.py``.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        monkeypatch.setattr(distributed, "count_cores", lambda: 1)
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Splits whose last training step has one row: an empty batch on all ranks but the last."""
    path = tmp_path_factory.mktemp("data") / "criteo_binary" / "split"
    write_split(
        path,
        {"train": [600, 320, 9, 0], "valid": [333], "test": [201]},
        table_sizes=TABLE_SIZES,
        dense=3,
    )
    return path


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    train_here(*flags_of(data, path))
    return path


@pytest.fixture(scope="session")
def two_ranks(data, whole, tmp_path_factory) -> Path:
    """By two ranks, not interrupted: ``same``, the run of ``whole``; ``adagrad``.

    ``early`` stops early; ``wider``: the second half of ``whole``, begun by one rank.
    """
    path = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as monkeypatch:
        train_until_pulled(monkeypatch, 30, *flags_of(data, path / "wider"))
    shutil.rmtree(path / "wider" / "log")
    runs = [
        flags_of(data, path / "same", batch_size=16),
        [*flags_of(data, path / "wider", batch_size=16), "--resume"],
        adagrad_flags(data, path / "adagrad", batch_size=16),
        early_flags(data, path / "early", batch_size=16),
    ]
    train_many(runs, 2)
    return path


@pytest.fixture(scope="session")
def learnable(tmp_path_factory) -> Path:
    """Splits with more rows, whose labels depend on all columns."""
    path = tmp_path_factory.mktemp("learnable") / "split"
    files = {"train": [16_384], "valid": [6_000], "test": [4_000]}
    write_split(path, files, table_sizes=(10, 30, 50), row_group_rows=4096)
    return path


@pytest.fixture(scope="session")
def outputs(tmp_path_factory) -> list[Path]:
    """By generation of the workflow, the splits with the same rows."""
    root = tmp_path_factory.mktemp("outputs")
    return [write_output(root / f"{number}", number) for number in range(3)]


@pytest.fixture
def started(data, whole, tmp_path) -> Path:
    """A run that has a checkpoint, and nothing after it."""
    shutil.copytree(whole / "steps", tmp_path / "steps")
    return tmp_path


@pytest.fixture
def inductor(monkeypatch) -> Iterator[list]:
    """The graphs that torch.compile hands to Inductor, which takes minutes: they run as they are.

    That its kernels are right is PyTorch's to test.
    """
    graphs = []

    def compile_fx(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()
