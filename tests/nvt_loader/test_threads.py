"""Threads and memory of iterators: finished, abandoned, still open when the process ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pyarrow as pa
import pytest

from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import limit_rows


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    write_split(root, {"train": [1000, 0, 100, 700, 50, 30]})
    return root / "train"


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("nvt_loader")]


def wait_for_no_threads() -> None:
    deadline = time.monotonic() + 100
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loader_threads() == []


def test_abandoned_and_finished_iterators_leave_no_thread(train, monkeypatch):
    limit_rows(monkeypatch, train, BLOCK=64)
    wait_for_no_threads()
    gc.disable()  # the reference count alone must do it
    try:
        loader = KJTLoader(train, 16, device="cpu")
        held = pa.total_allocated_bytes()
        for _ in range(100):
            for _batch in loader:
                break
        wait_for_no_threads()
        assert pa.total_allocated_bytes() - held < 1 << 20
        iterator = iter(loader)
        next(iterator)
        assert loader_threads()
        del iterator
        wait_for_no_threads()
        finished = iter(loader)
        assert len(list(finished)) == len(loader)
        wait_for_no_threads()
    finally:
        gc.enable()


def test_a_process_ends_while_an_iterator_is_open(train):
    code = f"""
from nvt_torchrec.nvt_loader import KJTLoader
iterator = iter(KJTLoader({str(train)!r}, 4, device="cpu"))
next(iterator)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=600)
