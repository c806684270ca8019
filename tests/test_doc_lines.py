"""The modules that `make lint` makes of README and docs for mypy --strict."""

from __future__ import annotations

import ast
import re

from tests.doc_lines import ROOT, modules


def test_pages_are_whole_modules() -> None:
    """Each parses, and has the lines of its page; what a row leaves out is left out."""
    found = modules()
    assert {"readme", "etl", "inference", "loader", "onnx", "training"} <= found.keys()
    for name, text in found.items():
        assert ast.parse(text, f"{name}.py").body
    assert 'Predictor.load("BUNDLE")' in found["inference"]
    assert "for batch in KJTLoader(" in found["readme"]


def test_lint_checks_them() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    [recipe] = re.findall(r"^lint:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert re.search(
        r"mypy .*--strict [^@]*build/doc_lines tests/typed_lines.py", recipe, re.DOTALL
    )
