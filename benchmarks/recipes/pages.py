"""The commands of docs/recipes."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
_BLOCK = re.compile(r"^```(bash(?: download)?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def recipes() -> list[str]:
    """Return the names of all recipes."""
    return sorted(page.stem for page in FOLDER.glob("*.md"))


def page(name: str) -> str:
    """Return the text of a recipe."""
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def script(name: str) -> str:
    """Return the commands of a recipe but those that download; they expect the log in RAW."""
    return "\n".join(block for kind, block in _BLOCK.findall(page(name)) if kind == "bash")


def downloads(name: str) -> str:
    """Return the commands of a recipe that download the log."""
    return "\n".join(block for kind, block in _BLOCK.findall(page(name)) if kind != "bash")
