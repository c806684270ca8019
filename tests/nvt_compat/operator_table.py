"""The table of docs/nvtabular.md: what each operator of NVTabular does under ``nvt_compat``.

A case fits a workflow on small partitions and transforms another frame; the expected values were
computed by hand, or by NumPy and pandas. To print the table::

    python -m tests.nvt_compat.operator_table
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvt_torchrec.nvt_compat  # noqa: F401

import dask.dataframe as dd
import numpy as np
import nvtabular
import pandas as pd
import pyarrow as pa
from merlin.schema import Tags
from nvtabular import ops
from scipy.sparse import csr_matrix

from nvt_torchrec.base.hashing import murmur3_int, murmur3_string
from nvt_torchrec.workflows import nodes

#: The operators that workflows of feature specs consist of.
OF_SPECS = {
    kind.rsplit(".", 1)[-1]
    for kind in (nodes.CATEGORIFY, nodes.FILL, nodes.CLIP, nodes.LAMBDA, nodes.NORMALIZE)
}
NOT_OF_SPECS = (
    'Categorify(encode_type="combo")',
    "Categorify(single_table=True)",
    "FillMissing(add_binary_cols=True)",
)
NAN = math.nan
HEAD = (
    "| operator | works | right | saved | in specs | |",
    "| --- | --- | --- | --- | --- | --- |",
)


def _frame(**columns: Any) -> pd.DataFrame:
    arrays = {}
    for name, values in columns.items():
        arrays[name] = values
        if isinstance(values, list) and values and isinstance(values[0], list | np.ndarray):
            arrays[name] = pd.Series(values, dtype=object)
    return pd.DataFrame(arrays)


def _lists(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, np.int64) for row in rows]


FLOATS = _frame(x=[1.0, 2.0, 100.0, NAN, 50.0, 3.0, 7.0, NAN])
FULL = _frame(x=[1.0, 2.0, 4.0, 9.0])
IDS = _frame(c=[5.0, 5.0, 7.0, NAN, 7.0, 7.0])
PAIRS = _frame(a=[1, 1, 2, 2], b=["x", "x", "x", "y"])
LISTS = _frame(l=_lists([5, 7, 9], [], [5], [9, 9]))
GROUPS = _frame(g=[1, 1, 2, 2, 2, 1], x=[1.0, 3.0, 5.0, 7.0, 9.0, 2.0])


@dataclasses.dataclass
class Case:
    """A workflow, and what it should give.

    Attributes:
        name: The operator, with the parameters in which it differs from other cases.
        make: Makes the nodes; takes a directory for vocabularies.
        fit: The frame that the workflow is fitted on.
        expected: The values by output column.
        asked: The frame that is transformed; None for the one it is fitted on.
        partitions: Into how many ``fit`` is divided.
        check: Another condition of the fitted workflow, such as of its schema.
        note: What a user should know, of what is wrong above all.
    """

    name: str
    make: Callable[[str], Any]
    fit: pd.DataFrame
    expected: dict[str, list]
    asked: pd.DataFrame | None = None
    partitions: int = 2
    check: Callable[[nvtabular.Workflow], bool] = lambda workflow: True
    note: str = ""

    @property
    def operator(self) -> str:
        """The name of the class."""
        return self.name.split("(")[0].split(" ")[0]


def _tagged(*tags: Tags) -> Callable[[nvtabular.Workflow], bool]:
    return lambda workflow: set(tags) <= set(workflow.output_schema["x"].tags)


def _property(workflow: nvtabular.Workflow) -> bool:
    return workflow.output_schema["x"].properties["k"] == 1


SAME = {"x": FULL["x"].tolist()}
CASES = [
    Case("AddMetadata", lambda _: ["x"] >> ops.AddMetadata([Tags.USER], {"k": 1}), FULL, SAME,
         check=lambda w: _tagged(Tags.USER)(w) and _property(w)),
    Case("AddProperties", lambda _: ["x"] >> ops.AddProperties({"k": 1}), FULL, SAME,
         check=_property),
    Case("AddTags", lambda _: ["x"] >> ops.AddTags([Tags.ITEM]), FULL, SAME,
         check=_tagged(Tags.ITEM)),
    Case("Bucketize", lambda _: ["x"] >> ops.Bucketize([2, 5]), FULL, {"x": [0, 1, 1, 2]},
         note="a missing value gets the top bucket: fill it first"),
    Case("Categorify", lambda path: ["c"] >> ops.Categorify(out_path=path), IDS,
         {"c": [4, 3, 1, 2]}, _frame(c=[5.0, 7.0, NAN, 9.0])),
    Case("Categorify of lists", lambda path: ["l"] >> ops.Categorify(out_path=path), LISTS,
         {"l": [[4, 3], [], [2]]}, _frame(l=_lists([5, 9], [], [8]))),
    Case("Categorify(max_size, num_buckets)",
         lambda path: ["c"] >> ops.Categorify(out_path=path, max_size=9, num_buckets=4), IDS,
         {"c": [7, 6, 1, 2 + murmur3_int(np.array([9]))[0] % 4]},
         _frame(c=[5.0, 7.0, NAN, 9.0])),
    Case('Categorify(encode_type="combo")',
         lambda path: nvtabular.ColumnSelector([("a", "b")])
         >> ops.Categorify(out_path=path, encode_type="combo"),
         PAIRS, {"a_b": [3, 3, 4, 5]}),
    Case("Categorify(single_table=True)",
         lambda path: ["a", "b"] >> ops.Categorify(out_path=path, single_table=True), PAIRS,
         {"a": [3, 4, 2, 1], "b": [5, 6, 2, 1]}, _frame(a=[1, 2, 7, NAN], b=["x", "y", "z", None]),
         note="the reserved ids 0, 1 and 2 are those of all columns"),
    Case("Clip", lambda _: ["x"] >> ops.Clip(2, 5), FULL, {"x": [2.0, 2.0, 4.0, 5.0]}),
    Case("ColumnSimilarity",
         lambda _: nvtabular.ColumnSelector([("a", "b")])
         >> ops.ColumnSimilarity(csr_matrix([[1.0, 2.0], [0.0, 3.0]]), metric="inner"),
         _frame(a=[0, 0, 1], b=[0, 1, 1]), {"a_b_sim": [5.0, 6.0, 9.0]}),
    Case("DataStats", lambda _: ["x"] >> ops.DataStats(), FULL, SAME,
         check=lambda w: (w.output_node.op.output["x"]["min"],
                          w.output_node.op.output["x"]["max"]) == (1, 9)),
    Case("DifferenceLag", lambda _: ["x"] >> ops.DifferenceLag("g"), GROUPS,
         {"x_difference_lag_1": [NAN, 2, NAN, 2, 2, NAN]}, partitions=1,
         note="the first rows of each partition have no row before them"),
    Case("DropLowCardinality",
         lambda path: ["a", "b"] >> ops.Categorify(out_path=path) >> ops.DropLowCardinality(4),
         _frame(a=[1, 1, 2, 2], b=[1, 2, 3, 4]), {"b": [3, 4, 5, 6]},
         note="counts the three reserved ids: two values have cardinality 5"),
    Case("Dropna", lambda _: ["x"] >> ops.Dropna(), FLOATS, {"x": [1, 2, 100, 50, 3, 7]}),
    Case("FillMedian", lambda _: ["x"] >> ops.FillMedian(), FLOATS,
         {"x": [1, 2, 100, 5, 50, 3, 7, 5]}, partitions=3,
         note="over several partitions not the median: `FillMissing` with a number"),
    Case("FillMissing", lambda _: ["x"] >> ops.FillMissing(4), FLOATS,
         {"x": [1, 2, 100, 4, 50, 3, 7, 4]}),
    Case("FillMissing(add_binary_cols=True)",
         lambda _: ["x"] >> ops.FillMissing(4, add_binary_cols=True), FLOATS,
         {"x": [1, 2, 100, 4, 50, 3, 7, 4],
          "x_filled": [False, False, False, True, False, False, False, True]}),
    Case("Filter", lambda _: ["x"] >> ops.Filter(lambda df: df[df["x"] > 2]), FULL,
         {"x": [4.0, 9.0]}),
    Case("Groupby",
         lambda _: ["g", "x"]
         >> ops.Groupby("g", sort_cols=["x"], aggs={"x": ["sum", "list", "first", "last"]}),
         GROUPS, {"g": [1, 2], "x_sum": [6, 21], "x_list": [[1, 2, 3], [5, 7, 9]],
                  "x_first": [1, 5], "x_last": [3, 9]}, partitions=1,
         note="a group must not be divided among partitions"),
    Case("HashBucket", lambda _: ["a", "b"] >> ops.HashBucket(7), PAIRS,
         {"a": (murmur3_int(PAIRS["a"].to_numpy()) % 7).tolist(),
          "b": (murmur3_string(pa.array(list("xxxy"))) % 7).tolist()},
         note="a missing value gets any bucket: fill it first"),
    Case("HashBucket of lists", lambda _: ["l"] >> ops.HashBucket(7), LISTS,
         {"l": [(murmur3_int(row) % 7).tolist() for row in LISTS["l"]]},
         note="`Categorify(num_buckets=…)` hashes lists"),
    Case("HashedCross", lambda _: nvtabular.ColumnSelector([("a", "d")]) >> ops.HashedCross(7),
         _frame(a=[1, 1, 2], d=[5, 6, 6]),
         {"a_X_d": ((murmur3_int(np.array([1, 1, 2])) ^ murmur3_int(np.array([5, 6, 6]))) % 7)
          .tolist()},
         note="exclusive or of the hashes: all pairs of equal values get bucket 0"),
    Case("JoinExternal",
         lambda _: ["a"] >> ops.JoinExternal(_frame(a=[1, 2], price=[10.0, 20.0]), "a"), PAIRS,
         {"a": [1, 1, 2, 2], "price": [10.0, 10.0, 20.0, 20.0]}),
    Case("JoinGroupby",
         lambda path: ["g"]
         >> ops.JoinGroupby(out_path=path, cont_cols=["x"], stats=["count", "sum", "mean"]),
         GROUPS, {"g_count": [3, 3, 3, 3, 3, 3], "g_x_sum": [6, 6, 21, 21, 21, 6],
                  "g_x_mean": [2, 2, 7, 7, 7, 2]}),
    Case("LambdaOp", lambda _: ["x"] >> ops.LambdaOp(lambda column: column * 2), FULL,
         {"x": [2.0, 4.0, 8.0, 18.0]}, note="in specs: the functions of `workflows/functions.py`"),
    Case("ListSlice", lambda _: ["l"] >> ops.ListSlice(-2), LISTS,
         {"l": [[7, 9], [], [5], [9, 9]]}),
    Case("ListSlice(pad=True)", lambda _: ["l"] >> ops.ListSlice(2, pad=True, pad_value=1), LISTS,
         {"l": [[5, 7], [1, 1], [5, 1], [9, 9]]},
         note="does not pad arrays, which is what lists are here: pad in the model"),
    Case("LogOp", lambda _: ["x"] >> ops.LogOp(), FULL, {"x": np.log1p(FULL["x"]).tolist()},
         note="warns of values of −1 or less"),
    Case("Normalize", lambda _: ["x"] >> ops.Normalize(), FULL,
         {"x": ((FULL["x"] - 4) / math.sqrt(38 / 3)).tolist()},
         note="an infinite mean is an error"),
    Case("NormalizeMinMax", lambda _: ["x"] >> ops.NormalizeMinMax(), FULL,
         {"x": [0, 1 / 8, 3 / 8, 1]}),
    Case("ReduceDtypeSize", lambda _: ["a"] >> ops.ReduceDtypeSize(), _frame(a=[1, 300, -5, 7]),
         {"a": [1, 300, -5, 7]}, check=lambda w: w.output_schema["a"].dtype.to_numpy == "int16"),
    Case("Rename", lambda _: ["x"] >> ops.Rename(postfix="_y"), FULL, {"x_y": SAME["x"]}),
    *[
        Case(name, lambda _, name=name: ["x"] >> getattr(ops, name)(), FULL, SAME,
             check=_tagged(*tags))
        for name, tags in (
            ("TagAsItemFeatures", [Tags.ITEM]), ("TagAsItemID", [Tags.ITEM, Tags.ID]),
            ("TagAsUserFeatures", [Tags.USER]), ("TagAsUserID", [Tags.USER, Tags.ID]),
        )
    ],
    Case("TargetEncoding",
         lambda path: ["g"] >> ops.TargetEncoding("x", out_path=path, p_smooth=1), GROUPS,
         {"TE_g_x": [(6 + 4.5) / 4, (21 + 4.5) / 4]}, _frame(g=[1, 2], x=[0.0, 0.0]),
         note="`transform` leaves a third of the training rows out for new rows, too, where "
              "NVTabular's documentation promises all of them: take `kfold=1`"),
    Case("TargetEncoding(kfold=1)",
         lambda path: ["g"] >> ops.TargetEncoding("x", out_path=path, p_smooth=1, kfold=1),
         GROUPS, {"TE_g_x": [(6 + 4.5) / 4, (21 + 4.5) / 4, 4.5]}, _frame(g=[1, 2, 9], x=[0.0] * 3),
         note="a training row's own label is in its feature"),
    Case("TargetEncoding(kfold=1) without the label",
         lambda path: ["g"] >> ops.TargetEncoding("x", out_path=path, p_smooth=1, kfold=1),
         GROUPS, {"TE_g_x": [(6 + 4.5) / 4]}, _frame(g=[1]),
         note="add the column, with any values"),
    Case("ValueCount", lambda _: ["l"] >> ops.ValueCount(), LISTS,
         {"l": [row.tolist() for row in LISTS["l"]]},
         check=lambda w: w.output_schema["l"].value_count.max == 3),
]  # fmt: skip


def _values(frame: pd.DataFrame) -> dict[str, list]:
    return {
        name: [row.tolist() if isinstance(row, np.ndarray) else row for row in frame[name]]
        for name in frame
    }


def _equal(found: dict[str, list], expected: dict[str, list]) -> bool:
    if found.keys() != expected.keys():
        return False
    try:
        for name, values in expected.items():
            if values and isinstance(values[0], list):
                assert list(map(list, found[name])) == values
            else:
                np.testing.assert_allclose(
                    np.array(found[name], float), np.array(values, float), rtol=1e-6
                )
    except AssertionError:
        return False
    return True


def _transform(workflow: nvtabular.Workflow, frame: pd.DataFrame) -> dict[str, list]:
    return _values(workflow.transform(frame.copy()))


def row(case: Case) -> str:
    """Run a case; return its line of the table."""
    asked = case.fit if case.asked is None else case.asked
    works, equal, saved = "yes", "no", "–"
    with tempfile.TemporaryDirectory() as directory:
        try:
            workflow = nvtabular.Workflow(case.make(directory))
            frame = dd.from_pandas(case.fit, npartitions=case.partitions, sort=False)
            workflow.fit(nvtabular.Dataset(frame, cpu=True))
            found = _transform(workflow, asked)
            equal = "yes" if _equal(found, case.expected) and case.check(workflow) else "no"
        except Exception as error:
            works, equal = f"**{type(error).__name__}**", "–"
        else:
            try:
                workflow.save(str(Path(directory, "saved")))
                again = _transform(nvtabular.Workflow.load(str(Path(directory, "saved"))), asked)
                saved = "yes" if str(again) == str(found) else "no"
            except Exception as error:
                saved = f"**{type(error).__name__}**"
    in_specs = "yes" if case.operator in OF_SPECS and case.name not in NOT_OF_SPECS else ""
    cells = [f"`{case.name}`", works, equal.replace("no", "**no**"), saved, in_specs, case.note]
    return f"| {' | '.join(cells)} |"


def table() -> list[str]:
    """Return the lines of the table."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        log = logging.getLogger("merlin")
        stack.callback(log.setLevel, log.level)
        logging.getLogger("nvtabular").setLevel(logging.CRITICAL)
        log.setLevel(logging.CRITICAL)
        return [*HEAD, *map(row, CASES)]


if __name__ == "__main__":
    print("\n".join(table()))
