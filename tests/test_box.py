"""The Dockerfiles."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
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


def test_the_image_for_cpus_has_the_locked_versions_and_compiled_code(tmp_path: Path) -> None:
    """Its commands, as far as they need no network and no container."""
    text = (ROOT / "deploy" / "cpu.Dockerfile").read_text()
    locked = re.findall(r"\$LOCKED .*-r requirements/(\w+)\.txt", text)
    assert locked == ["build", "torch", "cuda", "serve"]
    assert 'LOCKED="pip install --no-cache-dir --no-deps --require-hashes"' in text
    assert text.count("pip install ") == 2  # that, and the checkout itself
    pins = re.compile(r"^[a-z].*?==\S+", re.MULTILINE)
    served, every = (
        set(pins.findall((ROOT / "requirements" / f"{name}.txt").read_text()))
        for name in ("serve", "cpu")
    )
    assert served < every
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*extra["dependencies"], *extra["optional-dependencies"]["serve"]]
    names = {re.split("[<>=]", need)[0] for need in needed} - {"torch"}
    assert names < {pin.split("==")[0] for pin in served}
    (program,) = re.findall(r"USER 1000\n(?s:.*)^RUN python (.*)$", text, re.MULTILINE)
    command = [sys.executable, *shlex.split(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
