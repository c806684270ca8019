"""Names: a class and a file stand for one thing in the package, and functions are verbs."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "nvt_torchrec"
FILES = sorted(PACKAGE.rglob("*.py"))
#: What a function's name does not begin with.
_NO_VERB = re.compile(r"_?(of|by|with|without|in|on|at|for)(_|$)")
#: Names that others give: what NVTabular calls.
_GIVEN = {"by_count"}


def _named(kind: type[ast.AST]) -> list[str]:
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in FILES)
    return [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kind)]


def test_a_class_name_stands_for_one_thing() -> None:
    """Classes that are made in a function are of that function alone."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in FILES)
    names = Counter(
        node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_a_file_name_is_used_once() -> None:
    """But for a subcommand, which has the name of what it calls."""
    names = Counter(
        file.name
        for file in FILES
        if file.parent.name != "commands" and not file.name.startswith("__")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_functions_are_verbs() -> None:
    functions = _named(ast.FunctionDef)
    assert sorted({name for name in functions if _NO_VERB.match(name)} - _GIVEN) == []
