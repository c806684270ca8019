"""Operators that failed on pandas 3 or made NaN silently; the text of parquet that they get."""

from __future__ import annotations

import warnings

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import nvtabular
import pandas as pd
import pytest
from nvtabular import ops

from nvt_torchrec.base.errors import SchemaError


def _fit(node, frame: pd.DataFrame) -> nvtabular.Workflow:
    workflow = nvtabular.Workflow(node)
    workflow.fit(nvtabular.Dataset(frame, cpu=True))
    return workflow


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_log_of_too_little_is_told() -> None:
    frame = pd.DataFrame({"x": [-1.0, 2.0, -5.0, np.nan], "l": [[0.5, -2.0], [], [1.0], [3.0]]})
    with pytest.warns(UserWarning, match="LogOp: column") as caught:
        _fit(["x", "l"] >> ops.LogOp(), frame).transform(frame)
    texts = "\n".join(str(warning.message) for warning in caught)
    assert "LogOp: column x: 2 of 4 values are -1 or less (smallest -5)" in texts
    assert "LogOp: column l: 1 of 4 values are -1 or less (smallest -2)" in texts
    assert "Clip(min_value=0)" in texts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine = pd.DataFrame({"x": [-0.5, 0.0, np.nan]})
        ops.LogOp().transform(nvtabular.ColumnSelector(["x"]), fine)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:LogOp")
@pytest.mark.parametrize("values", [[-1.0, 2.0, 3.0], [2.0, -1.0], [np.inf, 1.0]])
def test_infinity_does_not_spread_over_a_column(values: list[float]) -> None:
    frame = pd.DataFrame({"x": values, "y": 1.0})
    with pytest.raises(SchemaError, match=rf"column x: the mean of its {len(values)} values is"):
        _fit(["x", "y"] >> ops.LogOp() >> ops.Normalize(), frame)
    missing = pd.DataFrame({"x": [np.nan] * 3})  # nothing to spread
    assert _fit(["x"] >> ops.Normalize(), missing).transform(missing)["x"].isna().all()


def test_difference_lag() -> None:
    frame = pd.DataFrame(
        {"user": [1, 1, 1, 2, 2, np.nan, np.nan], "day": [1, 1, 2, 2, 2, 3, 3],
         "time": [1000, 1005, 2000, 2020, 2040, 7, 9.0]}
    )  # fmt: skip
    result = _fit(["time"] >> ops.DifferenceLag("user", shift=[1, -1]), frame).transform(frame)
    nan = np.nan
    lag, lead = result["time_difference_lag_1"], result["time_difference_lag_-1"]
    np.testing.assert_array_equal(lag, [nan, 5, 995, nan, 20, nan, nan])
    np.testing.assert_array_equal(lead, [-5, -995, nan, -20, nan, nan, nan])
    assert lag.dtype == np.float32
    two = _fit(["time"] >> ops.DifferenceLag(["user", "day"]), frame).transform(frame)
    np.testing.assert_array_equal(two["time_difference_lag_1"], [nan, 5, nan, nan, 20, nan, nan])
