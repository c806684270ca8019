"""Tests of kernels in numba's simulator, which only a process of its own can have.

``tests/test_simulator.py`` runs them in one; by hand: ``NUMBA_ENABLE_CUDASIM=1 python -m pytest
tests/simulator``.
"""

from __future__ import annotations

import os

import pytest

from tests.simulator.device import SimulatedDevice

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()
