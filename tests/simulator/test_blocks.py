"""What a card counts in blocks is what the cpu engine counts, the moments to the last bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.engines import host
from nvt_torchrec.etl.engines.device.device_blocks import Gpu, count_block, merge_runs
from nvt_torchrec.etl.engines.runs import SortedRun
from nvt_torchrec.etl.units import counting
from nvt_torchrec.etl.units.counting import merge, merge_moments
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.rows import UNLIMITED
from tests.simulator.device import SimulatedDevice

SPEC = FeatureSpec(
    "label",
    (DenseColumn("d0", fill=3),),
    (
        CategoricalColumn("c0"),
        CategoricalColumn("c1", hash_buckets=3),
        CategoricalColumn("c2", vocabulary="c0"),
    ),
    "log_normalize",
)
PIECE = 120


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "PIECE_BYTES", PIECE)


def assert_same(found: SortedRun, expected: list[SortedRun]) -> None:
    assert found.rows == sum(run.rows for run in expected)
    np.testing.assert_array_equal(found.nulls, sum(run.nulls for run in expected))
    moments = np.concatenate([run.moments for run in expected])
    np.testing.assert_array_equal(found.moments.view(np.int64), moments.view(np.int64))
    for v, counts in enumerate(found.counts):
        merged = merge(run.counts[v] for run in expected)
        np.testing.assert_array_equal(counts.values, merged.values)
        np.testing.assert_array_equal(counts.counts, merged.counts)
        assert counts.values.dtype == merged.values.dtype


def check(path: Path, texts: list[bytes], spec: FeatureSpec = SPEC) -> None:
    path.write_bytes(b"".join(texts))
    ends = np.cumsum([0, *map(len, texts)]).tolist()
    blocks = [Block(str(path), begin, end, "log") for begin, end in itertools.pairwise(ends)]
    card = Gpu(SimulatedDevice())
    runs = [count_block(card, block, spec, max_bad_rows=UNLIMITED) for block in blocks]
    assert_same(
        merge_runs(card, runs), [host.count_block(block, spec, UNLIMITED) for block in blocks]
    )


values = st.sampled_from(["", "0", "1", "ff", "00000001", "80000000", "ffffffff"])
rows = st.tuples(
    st.sampled_from("01"),
    st.one_of(st.integers(-9, 10**6).map(str), st.sampled_from(["", "x", "0" * (PIECE - 9) + "7"])),
    *[values] * 3,
).map(lambda row: ("\t".join(row) + "\n").encode())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(rows, min_size=1, max_size=12), min_size=1, max_size=3))
def test_counts_and_moments(tmp_path_factory: pytest.TempPathFactory, blocks: list) -> None:
    check(tmp_path_factory.mktemp("log") / "day_0", [b"".join(block) for block in blocks])


@pytest.mark.parametrize("zeros", range(22))
def test_lines_that_end_around_the_end_of_a_piece(tmp_path: Path, zeros: int) -> None:
    lines = [f"1\t{'0' * zeros}17\t1\t2\t3"]
    lines += [f"1\t{3**i % 10_000:05d}\t1\t2\t{i}" for i in range(14)]
    check(tmp_path / "day_0", [("\n".join(lines) + "\n").encode()])


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_lines_about_as_long_as_a_piece(tmp_path: Path, size: int) -> None:
    other = "".join(f"0\t{i * i}\t1\t2\t3\n" for i in range(25))
    rest = "1\t\t4\t5\t6\n"
    long = rest.replace("\t", "\t" + "9".rjust(size - len(rest), "0"), 1)
    assert len(long) == size
    check(tmp_path / "day_0", [(other[:60] + other[60:] + long + other).encode()])


def test_a_piece_without_rows_changes_nothing() -> None:
    of_rows = np.array([[3.0, 1.0, 0.5, 2.0]])
    nothing = np.zeros((1, 4))
    np.testing.assert_array_equal(merge_moments([nothing, of_rows]), merge_moments([of_rows]))


def test_without_moments(tmp_path: Path) -> None:
    spec = FeatureSpec(SPEC.label, SPEC.dense, SPEC.categorical, "log")
    check(tmp_path / "day_0", [b"1\t2\t3\t4\t5\n" * 30], spec)
