"""Names: a class and a file stand for one thing in the package, and functions are verbs.

Variables say what they hold, and functions what they return.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "nvt_torchrec"
FILES = sorted(PACKAGE.rglob("*.py"))
#: What a function's name does not begin with.
_NO_VERB = re.compile(r"_?(of|by|with|without|in|on|at|for)(_|$)")


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}


def _named(kind: type[ast.AST]) -> list[str]:
    return [
        node.name for tree in _trees().values() for node in ast.walk(tree) if isinstance(node, kind)
    ]


def test_a_class_name_stands_for_one_thing() -> None:
    """Classes that are made in a function are of that function alone."""
    names = Counter(
        node.name
        for tree in _trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
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
    assert sorted({name for name in functions if _NO_VERB.match(name)}) == []


def test_variables_say_what_they_hold() -> None:
    """None is called ``of``, and ``one`` is a number, not what a loop or a call returns."""
    vague = [
        f"{file.relative_to(PACKAGE)}:{name.lineno} {name.id}"
        for file, tree in _trees().items()
        for node in ast.walk(tree)
        for target in _targets(node)
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
        if name.id == "of" or (name.id == "one" and not _is_number(node))
    ]
    assert vague == []


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    kinds = ast.For | ast.comprehension | ast.AnnAssign | ast.NamedExpr
    return [node.target] if isinstance(node, kinds) else []


def _is_number(node: ast.AST) -> bool:
    """Return whether a name is assigned 1, as Python's or a compiled loop's integer."""
    return isinstance(node, ast.Assign) and bool(
        re.fullmatch(r"(np\.u?int\d+\()?1\)?", ast.unparse(node.value))
    )


def test_functions_say_what_they_return() -> None:
    """By their annotation, or, where it is missing or Any, in the docstring.

    Kernels, which are decorated, return nothing.
    """
    silent = [
        f"{file.relative_to(PACKAGE)}:{function.lineno} {function.name}"
        for file, tree in _trees().items()
        for owner in ast.walk(tree)
        if isinstance(owner, ast.Module | ast.ClassDef)
        if not getattr(owner, "name", "").startswith("_")
        for function in owner.body
        if isinstance(function, ast.FunctionDef) and not function.name.startswith("_")
        if function.returns is None or ast.unparse(function.returns) == "Any"
        if function.returns or not function.decorator_list
        if not re.search(r"^(Return|Yield)|^Returns:", ast.get_docstring(function) or "", re.M)
    ]
    assert silent == []
