"""float16 and int8 tables: rounding, sums, bundles, and what they cost."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.model.scoring import JoinedTable
from nvt_torchrec.inference.predictor import Predictor
from tests.inference.conftest import Trained
from tests.inference.test_predictor import read_dicts


@settings(max_examples=60, deadline=None)
@given(
    values=npst.arrays(
        np.float32,
        npst.array_shapes(min_dims=2, max_dims=2, max_side=9),
        elements=st.floats(-(2.0**99), 2.0**99, width=32) | st.floats(-0.25, 0.25, width=32),
    )
)
def test_int8_is_off_by_half_a_step_at_most(values: np.ndarray) -> None:
    table = JoinedTable(torch.from_numpy(values)).convert("int8")
    assert table.values.dtype == torch.uint8
    got = table.look_up(torch.arange(len(values))).double().numpy()
    span = values.max(1, keepdims=True).astype(np.float64) - values.min(1, keepdims=True)
    rounding = 1e-5 * np.abs(values).max(1, keepdims=True) + np.finfo(np.float32).tiny
    assert (np.abs(got - values) <= span / 510 + rounding).all()


def test_what_a_type_cannot_hold_is_refused() -> None:
    table = JoinedTable(torch.tensor([[1.0, 7e4]]))
    with pytest.raises(SettingsError, match=r"larger than 65504.*\n.*int8"):
        table.convert("float16")
    with pytest.raises(SettingsError, match="tables are int8 and cannot be converted to float16"):
        table.convert("int8").convert("float16")
    with pytest.raises(SettingsError, match=r"tables 'int4'\n.*float32, float16, int8"):
        Predictor.load("nowhere", tables="int4")
    with pytest.raises(SettingsError, match=r"larger than 65504"):
        JoinedTable(torch.tensor([[float("nan")]])).convert("float16")


@pytest.mark.parametrize(("kind", "atol"), [("float16", 1e-3), ("int8", 2e-2)])
def test_a_bundle_scores_as_the_checkpoint_with_such_tables(
    shop: Trained, shop_predictor: Predictor, tmp_path: Path, kind: str, atol: float
) -> None:
    """Lists too: their sums are taken another way."""
    write_bundle(shop.workflow, shop.checkpoint, tmp_path / "bundle", tables=kind)
    bundled = Predictor.load(tmp_path / "bundle", check=True)
    assert bundled.model.table.kind == kind
    loaded = Predictor.load(shop.workflow, shop.checkpoint, tables=kind)
    rows = read_dicts(shop.raw / "day_2.csv", shop_predictor.spec)
    got = bundled.predict(rows)
    np.testing.assert_array_equal(loaded.predict(rows), got)
    exact = shop_predictor.predict(rows)
    assert 0 < np.abs(got - exact).max() < atol
    write_bundle(shop.workflow, shop.checkpoint, tmp_path / "whole")
    converted = Predictor.load(tmp_path / "whole", tables=kind)
    np.testing.assert_array_equal(converted.predict(rows), got)
    with pytest.raises(SettingsError, match=f"are {kind} and cannot be converted to float32"):
        Predictor.load(tmp_path / "bundle", tables="float32")
    for name in ("ranges.npy", "table.npy") if kind == "int8" else ("table.npy",):
        file = tmp_path / "bundle" / "weights" / name
        whole = file.read_bytes()
        changed = re.sub(rb"<f([24])", rb"<i\1", whole, count=1)  # of the same size
        file.write_bytes(changed.replace(b"|u1", b"|i1", 1))
        with pytest.raises(BadInputError, match=rf"damaged: {name} holds int"):
            Predictor.load(tmp_path / "bundle")
        file.write_bytes(whole)
