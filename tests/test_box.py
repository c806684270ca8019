"""The Dockerfile and the dry run of the GPU lock."""

from __future__ import annotations

import importlib.util
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
    assert made == ["build", "torch", "torch", "cuda", ""]  # PyTorch from WHEELS, or the index
    text = (ROOT / "Dockerfile").read_text()
    assert text.count("pip install --no-cache-dir --no-deps --require-hashes ") == 4


def test_nothing_built_goes_into_an_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in (ROOT / ".gitignore").read_text().split():
        name = line.strip("/")
        assert name in ignored or f"**/{name}" in ignored or name == "*.pyc", name


def test_unmet_requirements_are_found() -> None:
    spec = importlib.util.spec_from_file_location("resolve", ROOT / "requirements" / "resolve.py")
    resolve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(resolve)
    needs = ["b>=2", "c; extra == 'all'", "d; python_version < '3.12'", "e<3; sys_platform != 'x'"]
    packages = {"a": {"requires_dist": needs}}
    assert resolve.unmet("3.12", packages, {"b": "2.1", "e": "2"}) == []
    problems = resolve.unmet("3.11", packages, {"b": "1", "e": "3.0"})
    assert [line.split()[3].split(";")[0] for line in problems] == ["b>=2,", "d", "e<3"]
    cuda = {"toolkit": {"requires_dist": ["lib==13; extra == 'lib'", "no; extra == 'no'"]}}
    cuda["torch"] = {"requires_dist": ["toolkit[lib]"]}
    (problem,) = resolve.unmet("3.11", cuda, {"toolkit": "1"})
    assert problem.startswith("toolkit asks for lib==13")
    assert resolve.pins("torch.txt") == ["torch==2.13.0"]
