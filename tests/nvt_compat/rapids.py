"""The names of RAPIDS by its wheels' sources, parsed and never imported: no GPU is needed.

The sources lie in ``build/rapids`` or in ``$RAPIDS_SOURCES``; to fetch them (12 MB, no CUDA
libraries)::

    python -m tests.nvt_compat.rapids
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = Path(os.environ.get("RAPIDS_SOURCES", ROOT / "build" / "rapids"))
WHEELS = ("cudf-cu13", "pylibcudf-cu13", "rmm-cu13", "dask-cudf-cu13", "dask-cuda")
PACKAGES = ("cudf", "pylibcudf", "rmm", "dask_cudf", "dask_cuda")
#: What may follow a class or a package that this parser does not look into.
_HOPS = 20


@dataclasses.dataclass(frozen=True)
class Found:
    """What a name stands for.

    Attributes:
        module: where it is defined.
        node: its definition; None for a module, or for what a package imports from elsewhere.
        kind: "module", "class", "function", "value", or "foreign".
    """

    module: str
    node: ast.AST | None
    kind: str


def fetch(target: Path = SOURCES) -> None:
    """Download the wheels that requirements/gpu.txt names and keep their Python files."""
    lock = (ROOT / "requirements" / "gpu.txt").read_text()
    pins = [re.search(rf"^{name}==[^ \n]*", lock, re.MULTILINE)[0] for name in WHEELS]
    with tempfile.TemporaryDirectory() as folder:
        # 3.11 and 3.12 have the same: the wheels are built for all versions from 3.11 on
        options = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", f"--dest={folder}"]
        options += ["--platform=manylinux_2_28_x86_64", "--platform=manylinux_2_24_x86_64"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, *pins]
        subprocess.run(command, check=True)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith((".py", ".pyi"))]
                archive.extractall(target, [name for name in names if "/tests/" not in name])
    (target / "versions.txt").write_text("\n".join(pins) + "\n")


def _file(module: str) -> Path | None:
    base = SOURCES / module.replace(".", "/")
    for path in (base / "__init__.pyi", base.with_suffix(".pyi"), base.with_suffix(".py")):
        if path.is_file():
            return path
    path = base / "__init__.py"
    return path if path.is_file() else None


@functools.cache
def _names(module: str) -> dict[str, ast.AST]:
    """Name → what binds it at the top level of a module, also within ``if`` and ``try``."""
    found: dict[str, ast.AST] = {}
    todo = list(ast.parse(_file(module).read_text()).body)
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            todo = [*ast.iter_child_nodes(node), *todo]
    return found


def resolve(dotted: str) -> Found | None:
    """What ``cudf.Series.fillna`` is, say; None if there is no such name."""
    first, *rest = dotted.split(".")
    found: Found | None = Found(first, None, "module")
    for name in rest:
        if found is None or found.kind == "foreign":
            return found
        found = _member(found, name)
    return found


def _member(found: Found, name: str, hops: int = 0) -> Found | None:
    if hops > _HOPS:
        raise RecursionError(f"{found.module}.{name} is imported in a circle")
    if found.kind == "module":
        return _module_member(found.module, name, hops)
    if found.kind == "class":
        return _class_member(found, name, hops)
    if found.kind == "value":  # an object of a type that is not known here
        return Found(found.module, found.node, "foreign")
    return None


def _module_member(module: str, name: str, hops: int) -> Found | None:
    node = _names(module).get(name)
    if node is None:
        submodule = f"{module}.{name}"
        return Found(submodule, None, "module") if _file(submodule) else None
    if isinstance(node, ast.ClassDef):
        return Found(module, node, "class")
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return Found(module, node, "function")
    if isinstance(node, ast.ImportFrom):
        alias = next(a for a in node.names if (a.asname or a.name) == name)
        base = _absolute(module, node)
        if base.split(".")[0] not in PACKAGES:
            return Found(f"{base}.{alias.name}", None, "foreign")
        if base == module:  # a package that imports a module of its own
            return Found(f"{base}.{alias.name}", None, "module")
        return _member(Found(base, None, "module"), alias.name, hops + 1)
    if isinstance(node, ast.Import):
        return Found(name, None, "module" if name in PACKAGES else "foreign")
    return Found(module, node, "value")


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module
    parts = module.split(".")
    if _file(module).stem != "__init__":
        parts = parts[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _class_member(found: Found, name: str, hops: int) -> Found | None:
    for node in found.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return Found(found.module, node, "function")
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return Found(found.module, node, "value")
    for base in found.node.bases:
        base_found = _base(found.module, base)
        if base_found is not None and base_found.kind == "foreign":
            if _has(base_found.module, name):
                return Found(f"{base_found.module}.{name}", None, "foreign")
            continue
        inherited = base_found and _member(base_found, name, hops + 1)
        if inherited:
            return inherited
    return None


def _has(dotted: str, name: str) -> bool:
    """Whether a class of Dask, which is installed here, has a name."""
    module, _, of = dotted.rpartition(".")
    return module.startswith("dask.") and hasattr(
        getattr(importlib.import_module(module), of, None), name
    )


def _base(module: str, node: ast.expr) -> Found | None:
    parts = ast.unparse(node).split("[")[0].split(".")
    found = _module_member(module, parts[0], 0)
    for part in parts[1:]:
        found = found and _member(found, part)
    return found


def takes(found: Found, positional: int, keywords: set[str]) -> str:
    """What of a call's arguments a function or class does not take; "" if it takes them all."""
    if found.kind == "class":
        method = _class_member(found, "__init__", 0)
        return takes(method, positional + 1, keywords) if method else ""
    if found.kind != "function":
        return ""
    node, arguments = found.node, found.node.args
    static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    bound = bool(names) and names[0] in ("self", "cls") and not static
    if bound and node.name != "__init__":
        positional += 1
    unknown = keywords - {*names, *(argument.arg for argument in arguments.kwonlyargs)}
    if unknown and not arguments.kwarg:
        return f"no argument {', '.join(sorted(unknown))}"
    if positional > len(names) and not arguments.vararg:
        return f"{positional} positional arguments for {len(names)}"
    return ""


if __name__ == "__main__":
    fetch()
    print(SOURCES)
