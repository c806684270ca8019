"""Finishing a vocabulary: order, ties and policies against plain Python."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.workflows.vocabulary import fit_vocabulary
from tests.workflows.random_specs import as_columns, kept_values

_VALUES = {
    "hex32": st.integers(0, 2**32 - 1) | st.integers(0, 3),
    "int": st.integers(RAW_TYPES["int"].minimum, RAW_TYPES["int"].maximum) | st.integers(-3, 3),
    "string": st.text(min_size=1, max_size=4).filter(lambda s: s.encode("utf-8", "ignore")),
}
_COUNTS = st.integers(1, 4) | st.integers(1, 2**40)


@settings(deadline=None)
@given(data=st.data(), raw=st.sampled_from(sorted(_VALUES)))
def test_order_and_policy(data: st.DataObject, raw: str) -> None:
    text = raw == "string"
    values = _VALUES[raw].filter(lambda s: s.isprintable()) if text else _VALUES[raw]
    counts = data.draw(st.dictionaries(values, _COUNTS, max_size=30))
    policy = data.draw(
        st.sampled_from(
            [
                {},
                {"freq_threshold": 1},
                {"freq_threshold": 3},
                {"max_table_size": 3},
                {"max_table_size": 8},
                {"max_table_size": 10, "num_buckets": 4},
                {"freq_threshold": 2**50},
            ]
        )
    )
    column = CategoricalColumn("c", raw=raw, **policy)
    got = fit_vocabulary(*as_columns(counts, raw), column, nulls=7)
    kept = kept_values(counts, column)
    assert list(got.values.tolist()) == kept
    assert got.counts.tolist() == [counts[value] for value in kept]
    unique = sum(counts[value] for value in kept)
    assert got.observed == {"null": 7, "oov": sum(counts.values()) - unique, "unique": unique}
    assert got.counts.dtype == np.int64
    assert text or got.values.dtype == np.int64


@pytest.mark.parametrize("largest", [2**32 - 1, RAW_TYPES["int"].maximum])
def test_many_values(largest: int) -> None:
    """Ties by the thousand, and values so large that the fast key has no room for the counts."""
    rng = np.random.default_rng(0)
    values = np.unique(rng.integers(-largest * (largest > 2**32), largest + 1, 50_000))
    values = np.append(values, largest) if values[-1] != largest else values
    counts = np.minimum(rng.zipf(1.4, len(values)), 2**31)
    order = rng.permutation(len(values))
    got = fit_vocabulary(values[order], counts[order], CategoricalColumn("c", raw="int"), 0)
    expected = np.lexsort((values, -counts))
    assert (got.values == values[expected]).all()
    assert (got.counts == counts[expected]).all()
    assert Counter(got.counts.tolist())[1] > 1000
