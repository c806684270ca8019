"""Threads and memory of iterators: finished, abandoned, still open when the process ends."""

from __future__ import annotations

import gc
import os
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


def resident_bytes() -> int:
    """Memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_a_hundred_abandoned_loaders_do_not_grow(tmp_path):
    write_split(tmp_path, {"train": [50000]}, row_group_rows=10000)
    held = 0
    for i in range(120):
        loader = KJTLoader(tmp_path / "train", 500, shuffle=i % 2 == 1, device="cpu")
        next(iter(loader))
        if i == 20:  # what is allocated once is there
            wait_for_no_threads()
            held = resident_bytes()
    wait_for_no_threads()
    # each had more than a megabyte: a first block, decoded columns, a window
    assert resident_bytes() - held < 50 << 20


def test_a_process_ends_while_an_iterator_is_open(train):
    code = f"""
from nvt_torchrec.nvt_loader import KJTLoader
iterator = iter(KJTLoader({str(train)!r}, 4, device="cpu"))
next(iterator)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=600)
