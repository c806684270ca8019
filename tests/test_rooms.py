"""Imports: rooms and sub-rooms keep to their arrows, and no modules import each other in a circle.

Imports are read from the sources, those inside functions too: an import that is delayed to get
around a circle is still part of the circle.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shell import python

ROOT = Path(__file__).parents[1]

#: The rooms that each room may import. ``nvt_compat`` has a rule of its own, see below.
ROOMS: dict[str, set[str]] = {
    "base": set(),
    "nvt_compat": {"base"},
    "formats": {"base"},
    "clicklog": {"base", "formats"},
    "workflows": {"base", "formats", "clicklog"},
    "etl": {"base", "formats", "clicklog", "workflows"},
    "nvt_loader": {"base", "formats"},
    "models": {"base", "formats"},
    "training": {"base", "formats", "nvt_loader", "models"},
    "inference": {"base", "formats", "clicklog", "workflows", "models"},
    "estimator": {"base", "formats", "clicklog", "etl", "models", "training", "inference"},
}
#: Command lines and measurements: they may import every room, and no room imports them.
TOPS = ("demo", "benchmarks", "train_torchrec")
PACKAGE = ROOT / "nvt_torchrec"
#: What the names begin with under which rooms are imported. The tables here leave it out.
PREFIX = "nvt_torchrec."
#: Links to rooms: for ``python -m ROOM`` and ``import nvt_loader`` in a checkout, and for no more.
LINKS = ("etl", "inference", "nvt_loader", "workflows")

#: The sub-rooms of each room, and which sub-rooms of the same room each may import.
SUB_ROOMS: dict[str, dict[str, set[str]]] = {
    "base": {"files": set(), "pages": set(), "parquet": {"files"}},
    "formats": {"feature_spec": set()},
    "clicklog": {
        "text": set(),
        "readers": {"text"},
        "in_memory": {"readers", "text"},
        "synthetic": set(),
    },
    "workflows": {"compiled": set()},
    "etl": {
        "check": {"events", "finish", "labels", "negatives", "state"},
        "commands": {"check", "engines", "extend", "guess"},
        "engines": {"events", "state", "units"},
        "events": {"state", "tables", "units"},
        "extend": {"check", "engines", "finish", "labels", "state", "tables", "units"},
        "finish": {"state", "units"},
        "guess": set(),
        "labels": {"state", "tables", "units"},
        "negatives": {"state", "tables", "units"},
        "state": set(),
        "tables": {"state"},
        "units": {"state"},
    },
    "nvt_loader": {"parquet": set(), "cpu": {"parquet"}, "cuda": {"cpu", "parquet"}},
    "models": {"checkpoint": set(), "cuda": set()},
    "training": {
        "baselines": {"data", "launch", "settings"},
        "checkpoint": {"launch", "settings"},
        "data": {"checkpoint", "launch", "settings"},
        "launch": set(),
        "loop": {
            "baselines",
            "checkpoint",
            "data",
            "launch",
            "optim",
            "reporting",
            "settings",
            "sharding",
        },
        "optim": {"settings"},
        "reporting": {"baselines", "data", "launch", "settings", "sharding"},
        "settings": set(),
        "sharding": {"baselines", "data", "launch", "optim", "settings"},
    },
    "inference": {
        "commands": {"export", "model", "publish", "server"},
        "export": {"model", "server"},
        "model": set(),
        "publish": {"model"},
        "server": {"model"},
    },
}

#: Outside of ``nvt_compat`` and the measurements: the modules that import NVTabular or Merlin.
NVTABULAR_MODULES = {"etl.engines.nvtabular", "nvt_loader.merlin", "workflows.store"}
#: Modules that import ``nvt_compat`` for NVTabular in other modules or processes.
COMPAT_MODULES = {
    "etl.engines.cluster",  # the workers' graphs
}
_NVTABULAR = {"nvtabular", "merlin"}
_HEAVY = {"torch", "torchrec", "fbgemm_gpu", "dask", "distributed", "pandas", "cudf", "dask_cudf"}
#: Packages that a room imports nowhere, not even inside a function.
FORBIDDEN = {
    "base": _HEAVY - {"torch"} | _NVTABULAR,
    "formats": _HEAVY | _NVTABULAR,
    "clicklog": _HEAVY | _NVTABULAR,
    "workflows.compiled": _HEAVY | _NVTABULAR,
    "etl": {"torch", "torchrec", "fbgemm_gpu"},
    "nvt_loader": _NVTABULAR | {"dask", "distributed"},
    "models": _NVTABULAR | {"torchrec", "dask", "distributed"},
    "training": _NVTABULAR | {"dask", "distributed"},
    "inference": {"torchrec", "dask", "distributed"},
}


@functools.cache
def _modules() -> dict[str, Path]:
    """Return the files of all modules by name; the name of a package is that of its __init__."""
    names = {"train_torchrec": PACKAGE / "train_torchrec.py"}
    rooms = [PACKAGE / room for room in ROOMS]
    for room in (*rooms, ROOT / "demo", ROOT / "benchmarks"):
        for file in sorted(room.rglob("*.py")):
            parts = file.relative_to(room.parent).with_suffix("").parts
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


@functools.cache
def _imports(module: str, *, types: bool = True) -> frozenset[str]:
    """Return what a module imports anywhere: our modules by full name, others as written.

    Without ``types``, imports under ``if TYPE_CHECKING`` are left out: they are never executed.
    """
    found = set()
    for node in _nodes(ast.parse(_modules()[module].read_text(encoding="utf-8")), types):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import; write the full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            assert _room(name) not in ROOMS, f"{module}: write {PREFIX}{name}"
            short = name.removeprefix(PREFIX)
            if isinstance(node, ast.ImportFrom) and short not in _modules():
                short = short.rpartition(".")[0]
            found.add(short)
    return frozenset(found - {module})


def _nodes(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if types or not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from _nodes(node, types)


def _room(module: str) -> str:
    return module.split(".")[0]


def _sub_room(module: str) -> str:
    """Return ``clicklog.text`` for ``clicklog.text.tokenizer``; other modules are unchanged."""
    room, *rest = module.split(".")
    if rest and rest[0] in SUB_ROOMS.get(room, {}):
        return f"{room}.{rest[0]}"
    return module


def _graph(room: str) -> dict[str, set[str]]:
    """Return the imports between the modules of a room."""
    own = [module for module in _modules() if _room(module) == room]
    return {module: {other for other in _imports(module) if other in own} for module in own}


def test_links_at_the_top_are_to_rooms() -> None:
    links = {path.name: path.resolve() for path in ROOT.iterdir() if path.is_symlink()}
    assert links == {room: PACKAGE / room for room in LINKS}


def test_a_link_leads_to_the_same_modules() -> None:
    """In a checkout, ``from nvt_loader.plan import Plan`` gives the class of nvt_torchrec."""
    lines = ["import importlib, sys"]
    for room in LINKS:
        modules = [m for m in _modules() if _room(m) == room and "__main__" not in m]
        lines.append(f"for name in {sorted(m for m in modules if not _needs_a_card(m))}:")
        lines.append("    link = importlib.import_module(name)")
        lines.append(f"    if link is not importlib.import_module('{PREFIX}' + name): print(name)")
    done = python("-c", "\n".join(lines), warm=True)
    assert (done.stdout, done.stderr) == ("", "")


def _needs_a_card(module: str) -> bool:
    return not {"cuda", "device"}.isdisjoint(module.split("."))


def test_imports_inside_functions_and_of_modules_count() -> None:
    assert "base.interrupts" in _imports("base.errors")  # inside a function
    assert "workflows.nodes" in _imports("workflows.store")  # from workflows import nodes


def test_rooms_import_only_the_rooms_below_them() -> None:
    wrong = []
    for module in _modules():
        room = _room(module)
        if room in TOPS:
            continue
        for other in _imports(module):
            target = _room(other)
            known = target in ROOMS or target in TOPS
            allowed = ROOMS[room] | {room, "nvt_compat"}
            if known and target not in allowed:
                wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_sub_rooms_import_only_the_sub_rooms_below_them() -> None:
    wrong = []
    for module in _modules():
        room, *rest = module.split(".")
        if room not in SUB_ROOMS or not rest or rest[0] not in SUB_ROOMS[room]:
            continue
        allowed = SUB_ROOMS[room][rest[0]] | {rest[0]}
        for other in _imports(module):
            target, *inner = other.split(".")
            if target == room and inner and inner[0] in SUB_ROOMS[room].keys() - allowed:
                wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", SUB_ROOMS)
def test_every_sub_room_is_in_the_table(room: str) -> None:
    there = {file.parent.name for file in (PACKAGE / room).glob("*/*.py")}
    unknown = there - SUB_ROOMS[room].keys()
    assert not unknown, f"{room}: add {sorted(unknown)} to SUB_ROOMS, with what it may import"


@pytest.mark.parametrize("room", ROOMS)
def test_no_modules_of_a_room_import_in_a_circle(room: str) -> None:
    graphlib.TopologicalSorter(_graph(room)).prepare()  # raises an error that names the circle


@pytest.mark.parametrize("room", SUB_ROOMS)
def test_no_sub_rooms_import_in_a_circle(room: str) -> None:
    """A sub-room is one node; a module that lies directly in the room is one too."""
    graph: dict[str, set[str]] = {}
    for module, others in _graph(room).items():
        own = _sub_room(module)
        graph.setdefault(own, set()).update({_sub_room(other) for other in others} - {own})
    graphlib.TopologicalSorter(graph).prepare()


def test_nvtabular_is_imported_where_it_is_patched_and_nowhere_else() -> None:
    found = {
        module
        for module in _modules()
        if _room(module) not in ("nvt_compat", *TOPS)
        and {_room(other) for other in _imports(module, types=False)} & _NVTABULAR
    }
    assert found == NVTABULAR_MODULES


def test_only_what_imports_nvtabular_imports_its_patches() -> None:
    found = {
        module
        for module in _modules()
        if _room(module) not in ("nvt_compat", *TOPS)
        and "nvt_compat" in {_room(other) for other in _imports(module)}
    }
    assert found == NVTABULAR_MODULES | COMPAT_MODULES


@pytest.mark.parametrize("room", FORBIDDEN)
def test_packages_that_a_room_does_without(room: str) -> None:
    for module in _modules():
        if module == room or module.startswith(f"{room}."):
            found = {_room(other) for other in _imports(module, types=False)} & FORBIDDEN[room]
            found -= _NVTABULAR if module in NVTABULAR_MODULES else set()
            assert not found, f"{module} imports {sorted(found)}"
