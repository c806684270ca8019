"""A line of three generations of a workflow, and the counts of further days."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.workflows.extension.workflow import DayCounts
from nvt_torchrec.workflows.vocabulary import apply_policy
from nvt_torchrec.workflows.writer import Fitted
from tests.workflows.test_extension import extend, write_base

SPEC = FeatureSpec(
    "label",
    (DenseColumn("price", raw="float"),),
    (
        CategoricalColumn("cat_0"),
        CategoricalColumn("user", raw="int", freq_threshold=3),
        CategoricalColumn("item", raw="string", max_table_size=5),
        CategoricalColumn("city", raw="string", hash_buckets=10),
    ),
)


def moments_of(*values: float) -> np.ndarray:
    mean = np.mean(values)
    m2 = np.sum((np.array(values) - mean) ** 2)
    return np.array([[len(values), values[0], mean - values[0], m2]])


def fitted() -> Fitted:
    """item: a and b have the ids 3 and 4, c and d none; user: 5 has none."""
    counted = {
        "cat_0": apply_policy(np.array([7, 8]), np.array([9, 4]), SPEC.categorical[0], 1),
        "user": apply_policy(np.array([5, 1]), np.array([2, 6]), SPEC.categorical[1], 0),
        "item": apply_policy(
            pa.array(["d", "c", "a", "b"]), np.array([1, 2, 9, 5]), SPEC.categorical[2], 0
        ),
        "city": apply_policy(pa.array([], pa.string()), np.empty(0), SPEC.categorical[3], 0),
    }
    return Fitted(
        {"price": {"mean": 2.0, "std": 1.0}},
        {name: own for name, (own, _) in counted.items()},
        {name: pending for name, (_, pending) in counted.items()},
        moments_of(1.0, 2.0, 3.0),
    )


def day(number: int, **values: dict) -> DayCounts:
    return DayCounts(
        number,
        {
            name: (
                pa.array(list(own)) if name == "item" else np.array(list(own), np.int64),
                np.array(list(own.values()), np.int64),
            )
            for name, own in values.items()
        },
        {"cat_0": 2},
        moments_of(10.0, 20.0),
    )


def write_line(root: Path) -> Path:
    """Write directories 0, 1 and 2: in generation 2 item e has the id of a."""
    write_base(root / "0", SPEC, fitted(), [3, 4])
    extend(root / "0", root / "1", day(6, cat_0={0x99: 1, 7: 1}, user={5: 1, 9: 2}, item={"b": 1}))
    extend(
        root / "1", root / "2", day(7, user={9: 1}, item={"e": 2, "b": 1}), retire_after_days=3,
        update_statistics=True,
    )  # fmt: skip
    return root


def run(*args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "workflows", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def edit(file: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))
