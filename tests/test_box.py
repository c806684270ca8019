"""The Dockerfile."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_dockerfile_installs_what_make_env_does() -> None:
    """The same files, in the same order, so that a lock changed here is changed there."""
    names = r"requirements/(\w+)\.txt"
    docker = re.findall(rf"-r {names}", (ROOT / "Dockerfile").read_text())
    assert docker == ["build", "torch", "cuda", "gpu"]
    recipe = (ROOT / "Makefile").read_text().split("$(BUILT):")[1].split("$(LINKED):")[0]
    made = re.findall(r"-r (?:requirements/(\w+)\.txt|\$\(LOCK\))", recipe)
    assert made == ["build", "torch", "cuda", ""]
    text = (ROOT / "Dockerfile").read_text()
    assert text.count("pip install --no-cache-dir --no-deps --require-hashes ") == 4


def test_nothing_built_goes_into_an_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in (ROOT / ".gitignore").read_text().split():
        name = line.strip("/")
        assert name in ignored or f"**/{name}" in ignored or name == "*.pyc", name
