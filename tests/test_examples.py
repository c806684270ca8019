"""Hypothesis' examples are the same in every run; see ``conftest.py``."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def _examples() -> list:
    found = []

    @settings(max_examples=300, deadline=None, database=None)
    @given(st.integers() | st.text())
    def keep(value) -> None:
        found.append(value)

    keep()
    return found


@pytest.mark.skipif("HYPOTHESIS_PROFILE" in os.environ, reason="another profile was asked for")
def test_examples_do_not_depend_on_what_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hypothesis would take the constants of such a module as examples."""
    before = _examples()
    module = tmp_path / "constants.py"
    module.write_text(f"NUMBERS = {[7**i for i in range(8, 200)]}\n")
    spec = importlib.util.spec_from_file_location("imported_later", module)
    assert spec is not None
    monkeypatch.setitem(sys.modules, spec.name, importlib.util.module_from_spec(spec))
    assert _examples() == before
    assert len(set(map(str, before))) > 100
