"""Tests of Triton's kernels in its interpreter, which only a process of its own can have.

``tests/test_simulator.py`` runs them in one where Triton is installed; by hand:
``TRITON_INTERPRET=1 python -m pytest tests/triton_interpreter``.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
