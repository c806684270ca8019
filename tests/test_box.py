"""The Dockerfiles."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
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
    (torch,) = re.findall(r"^ARG TORCH=(\S+)$", text, re.MULTILINE)
    assert f"{torch} " in (ROOT / "requirements" / "torch.txt").read_text()
    (command,) = re.findall(r"(sed .*) > /tmp/versions", text)
    versions = subprocess.check_output(["bash", "-c", command], cwd=ROOT, text=True).splitlines()
    assert len(versions) == (ROOT / "requirements" / "cpu.txt").read_text().count("==")
    (program,) = re.findall(r"USER 1000\n(?s:.*)^RUN python (.*)$", text, re.MULTILINE)
    command = [sys.executable, *shlex.split(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
