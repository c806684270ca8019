"""What of torch.cuda threads use, on a CPU: the current device and stream of each thread."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest
import torch


@dataclasses.dataclass
class Stream:
    """A stream, whose events record nothing."""

    device: torch.device

    def record_event(self):
        return "event"

    def wait_event(self, event):
        assert event == "event"


def install(patch: pytest.MonkeyPatch) -> set[int]:
    """Give each thread a current device, the first one at its start, as CUDA does.

    Args:
        patch: Undoes it at the end of the test.

    Returns:
        The numbers of the devices that threads have touched, and so created a context on. It grows.
    """
    current = threading.local()
    touched: set[int] = set()

    def set_device(device):
        current.device = torch.device(device)
        touched.add(current.device.index)

    def current_stream(device=None):
        return Stream(torch.device(device or getattr(current, "device", "cuda:0")))

    @contextlib.contextmanager
    def stream(own):
        if own is None:
            yield
            return
        before = current_stream()
        set_device(own.device)  # torch.cuda.set_stream does
        try:
            yield
        finally:
            set_device(before.device)

    for function in (set_device, current_stream, stream):
        patch.setattr(torch.cuda, function.__name__, function)
    return touched
