"""Every name of RAPIDS that we or Merlin call is in the wheels that requirements/gpu.txt names.

Parsed, not imported: ``tests/nvt_compat/rapids.py`` says how to get the sources. Methods of frames
and columns, which a parser cannot see, are called by ``tests/gpu``.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.nvt_compat.rapids import ROOT, SOURCES, resolve, takes

needs_sources = pytest.mark.skipif(
    not (SOURCES / "cudf").is_dir(),
    reason=f"no sources of RAPIDS in {SOURCES}: make rapids-sources",
)

OURS = [
    *(ROOT / "nvt_torchrec" / room for room in ("clicklog", "etl", "workflows", "nvt_loader")),
    ROOT / "nvt_torchrec" / "nvt_compat",
    ROOT / "benchmarks",
]
#: Parts of Merlin that an ETL and a loader use; not its tests, tools and other frameworks.
MERLIN = ("merlin/core", "merlin/io", "merlin/dag", "merlin/table", "merlin/dtypes")
MERLIN += ("merlin/dataloader", "nvtabular/ops", "nvtabular/workflow")

#: Names that Merlin uses and RAPIDS 26.10 has not: why that is no harm.
GONE = {
    "cudf.core.column.build_categorical_column": "supplied: imported, never called",
    "cudf.core.column.build_column": "supplied",
    "cudf.DataFrame.from_pandas": "supplied",
    "dask_cudf.from_dask_dataframe": "supplied",
    "dask_cudf.io.parquet.CudfEngine.read_metadata": "Dask asks its engines for none any more",
    "cudf.utils.dtypes.is_list_dtype": "where cudf.api.types has none, before 21.08",
    "cudf.utils.dtypes.is_string_dtype": "where cudf.api.types has none, before 21.08",
}
#: Supplied beside those: methods, which are not called by a module's name.
METHODS_GONE = {"cudf.core.column.ListColumn.offsets", "dask_cudf.DataFrame.to_dask_dataframe"}


def _merlin_files() -> list[Path]:
    found = []
    for folder in MERLIN:
        package, rest = folder.split("/")
        for root in find_spec(package).submodule_search_locations:
            found += Path(root, rest).rglob("*.py")
    return sorted(path for path in found if "tests" not in path.parts)


def _our_files() -> list[Path]:
    return sorted(path for room in OURS for path in room.rglob("*.py"))


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name → the name of RAPIDS that it stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in _RAPIDS:
                    found[alias.asname or alias.name.split(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                local = alias.asname or alias.name
                if node.module.split(".")[0] in _RAPIDS:
                    found[local] = f"{node.module}.{alias.name}"
                elif node.module == "merlin.core.compat" and alias.name in _RAPIDS:
                    found[local] = alias.name
    return found


_RAPIDS = ("cudf", "dask_cudf", "dask_cuda", "rmm", "pylibcudf")


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    return ".".join([aliases[node.id], *reversed(names)])


def _uses(path: Path) -> Iterator[tuple[str, ast.Call | None, str]]:
    """Names of RAPIDS in a file, the call if it is one, and where."""
    tree = ast.parse(path.read_text())
    aliases = _aliases(tree)
    for name in aliases.values():
        yield name, None, f"{path.name}: import"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _dotted(node.func, aliases)):
            yield name, node, f"{path.name}:{node.lineno}"
        elif isinstance(node, ast.Attribute) and (name := _dotted(node, aliases)):
            yield name, None, f"{path.name}:{node.lineno}"


def _missing(files: list[Path]) -> tuple[dict[str, str], list[str]]:
    """Names that are not there → where they are used; and calls with wrong arguments."""
    gone, wrong = {}, []
    for path in files:
        for name, call, where in _uses(path):
            found = resolve(name)
            if found is None:
                gone[name] = where
            elif call and not any(isinstance(a, ast.Starred) for a in call.args):
                keywords = {keyword.arg for keyword in call.keywords if keyword.arg}
                problem = takes(found, len(call.args), keywords)
                if problem:
                    wrong.append(f"{where}: {name}: {problem}")
    return gone, wrong


@needs_sources
def test_what_merlin_calls_is_there_or_supplied() -> None:
    gone, wrong = _missing(_merlin_files())
    assert gone.keys() == GONE.keys(), gone
    assert wrong == []


@needs_sources
def test_what_we_call_is_there() -> None:
    gone, wrong = _missing(_our_files())
    assert gone.keys() == {"cudf.DataFrame.from_pandas"} & gone.keys(), gone
    assert wrong == []


@needs_sources
def test_what_is_supplied_is_gone() -> None:
    """The day a name comes back, its replacement here can go."""
    tree = ast.parse((ROOT / "nvt_torchrec" / "nvt_compat" / "cudf_names.py").read_text())
    aliases = _aliases(tree)
    supplied = {
        f"{_dotted(node.args[0], aliases)}.{keyword.arg}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "supply"
        for keyword in node.keywords
    }
    assert supplied == METHODS_GONE | {name for name, why in GONE.items() if "supplied" in why}
    assert {name for name in supplied if resolve(name)} == set()
    # what changed its arguments
    source = (SOURCES / "cudf" / "core" / "series.py").read_text()
    assert "Use cudf.Series._from_column for constructing a Series from" in source
    source = (SOURCES / "cudf" / "core" / "column" / "column.py").read_text()
    assert "dtype must be None or a dtype object" in source
    assert "blocksize" in {a.arg for a in resolve("dask_cudf.io.csv.read_csv").node.args.args}


@needs_sources
def test_what_strings_need_is_still_needed() -> None:
    source = (SOURCES / "cudf" / "core" / "groupby" / "groupby.py").read_text()
    tree = ast.parse(source)
    (strings,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_STRING_AGGS"
    ]
    assert "SIZE" in strings  # compared with "size"
    assert "return str_agg not in _STRING_AGGS and (" in source
    source = (SOURCES / "cudf" / "core" / "dtypes.py").read_text()
    assert 'header["element-type"] = getattr(' in source


@pytest.mark.skipif(find_spec("cudf") is None, reason="needs RAPIDS, but no GPU")
def test_strings_on_cudf() -> None:
    """Its own checks and dtypes, which are plain Python."""
    code = """
import merlin.core.has_gpu
merlin.core.has_gpu.HAS_GPU = True
import nvt_torchrec.nvt_compat, cudf, numpy as np, pandas as pd
from cudf.core.abc import Serializable
from cudf.core.groupby import groupby
text = pd.StringDtype(na_value=np.nan)
refused = {a for a in ("size", "sum", "mean") if groupby._is_unsupported_agg_for_type(text, a)}
assert refused == {"sum", "mean"}, refused
for dtype in (text, np.dtype("int64"), cudf.ListDtype("int32")):
    sent = cudf.ListDtype(dtype).device_serialize()
    assert Serializable.device_deserialize(*sent).element_type == dtype
"""
    environment = os.environ | {"RAPIDS_NO_INITIALIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_edits_fit_merlin_and_leave_pandas_alone() -> None:
    """They are made on machines with a GPU only; here in a process of its own."""
    code = """
import nvt_torchrec.nvt_compat, numpy as np, pandas as pd
from nvt_torchrec.nvt_compat.cudf_names import patch_dispatch
patch_dispatch()
from merlin.core import dispatch
lists = dispatch.create_multihot_col(pd.Series([0, 2, 3]), pd.Series([7, 8, 9]))
assert [list(row) for row in lists] == [[7, 8], [9]]
assert dispatch.make_series([1, 2]).tolist() == [1, 2]
assert dispatch.hex_to_int(pd.Series(["ff", None])).tolist() == [255, pd.NA]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
