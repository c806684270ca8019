"""The ETL on cuDF gives what the cpu engine and plain Python give, value by value."""

from __future__ import annotations

import itertools
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import dask.dataframe as dd
import numpy as np
import nvtabular
import pandas as pd
import pyarrow.parquet as pq
import pytest
from merlin.core import dispatch
from merlin.core.utils import set_dask_client

from nvt_torchrec.base.hashing import murmur3_int
from nvt_torchrec.etl.commands.check import check
from nvt_torchrec.etl.engines import cluster
from nvt_torchrec.etl.engines.nvtabular import transform_frame
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.rows import RawRows, make_empty_rows
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.store import build, extract_fitted, load
from nvt_torchrec.workflows.workflow_frames import to_frame
from nvt_torchrec.workflows.writer import write_workflow
from tests.etl.runs import assert_is, parts, read_split, settings, tree
from tests.logs import CRITEO, write_log
from tests.workflows.random_specs import Oracle, random_raw_rows

POLICIES = {
    "plain": {},
    "rare": {"freq_threshold": 2},
    "capped": {"max_table_size": 6},
    "buckets": {"max_table_size": 9, "num_buckets": 3},
    "hashed": {"hash_buckets": 5},
}


def every_kind(raw: str, *, multi_hot: bool) -> FeatureSpec:
    """A column for each vocabulary policy, two columns that share one, and dense columns."""
    columns = [
        CategoricalColumn(name, raw=raw, multi_hot=multi_hot, **policy)
        for name, policy in POLICIES.items()
    ]
    columns += [
        CategoricalColumn(f"shared_{i}", raw=raw, multi_hot=bool(i), vocabulary="shared")
        for i in range(2)
    ]
    dense = (DenseColumn("d0", fill=-1, raw="int32"), DenseColumn("d1", fill=0.25, raw="float"))
    return FeatureSpec("label", dense, tuple(columns), "log_normalize")


def fit(spec: FeatureSpec, parts: list[RawRows], directory: Path, *, gpu: bool):
    """A Workflow over the partitions of a Dask DataFrame."""
    meta = to_frame(make_empty_rows(spec), spec, gpu=gpu)
    options = {"spec": spec, "gpu": gpu, "meta": meta, "enforce_metadata": False}
    frame = dd.from_map(to_frame, parts, **options)
    return build(spec, directory).fit(nvtabular.Dataset(frame, cpu=not gpu))


@pytest.mark.parametrize("multi_hot", [False, True])
@pytest.mark.parametrize("raw", ["hex32", "int", "string"])
def test_every_policy_by_plain_python(
    rapids: bool, tmp_path: Path, raw: str, multi_hot: bool
) -> None:
    """Vocabularies with ties, caps, thresholds, shared ones; hashes, nulls, unseen values."""
    spec = every_kind(raw, multi_hot=multi_hot)
    parts = [random_raw_rows(spec, rows, seed) for seed, rows in enumerate((40, 0, 25))]
    oracle = Oracle(spec, parts)
    set_dask_client(None)
    try:
        fitted = extract_fitted(fit(spec, parts, tmp_path / "fit", gpu=rapids), spec)
        write_workflow(tmp_path / "workflow", spec, fitted)
        loaded = load(tmp_path / "workflow")
        schema = inspect(tmp_path / "workflow").table_schema
        for rows in (random_raw_rows(spec, 30, 99), parts[0]):
            frame = to_frame(rows, spec, gpu=rapids)
            table = transform_frame(frame, loaded, schema, gpu=rapids)
            expected = oracle.transform(rows)
            for name in spec.categorical_names:
                assert table[name].to_pylist() == expected[name], name
            for name in spec.dense_names:
                np.testing.assert_allclose(table[name], expected[name], rtol=1e-5, atol=1e-5)
    finally:
        set_dask_client("auto")


def test_lists_of_strings_travel_between_workers(rapids: bool, client, tmp_path: Path) -> None:
    """Frames with them are sent to the scheduler, to workers and back."""
    spec = every_kind("string", multi_hot=True)
    parts = [random_raw_rows(spec, rows, seed) for seed, rows in enumerate((40, 25))]
    fitted = extract_fitted(fit(spec, parts, tmp_path / "fit", gpu=rapids), spec)
    write_workflow(tmp_path / "workflow", spec, fitted)
    oracle, loaded = Oracle(spec, parts), load(tmp_path / "workflow")
    schema = inspect(tmp_path / "workflow").table_schema
    rows = random_raw_rows(spec, 30, 99)
    sent = client.submit(to_frame, rows, spec, gpu=rapids).result()
    table, expected = transform_frame(sent, loaded, schema, gpu=rapids), oracle.transform(rows)
    for name in spec.categorical_names:
        assert table[name].to_pylist() == expected[name], name


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """Three days, with unseen values and many ties in the last."""
    raw = tmp_path_factory.mktemp("log") / "raw"
    return raw, write_log(raw, [900, 700, 401], seed=3)


def test_a_run_on_a_cluster_equals_the_cpu_engine(log, client, tmp_path: Path) -> None:
    raw, days = log
    run(settings(raw, tmp_path / "cpu"))
    run(settings(raw, tmp_path / "gpu", scheduler=client.scheduler.address))
    for split in SPLITS:
        expected, got = read_split(tmp_path / "cpu", split), read_split(tmp_path / "gpu", split)
        ids = [CRITEO.label, *CRITEO.categorical_names]
        pd.testing.assert_frame_equal(got[ids], expected[ids])
        np.testing.assert_allclose(
            got[CRITEO.dense_names], expected[CRITEO.dense_names], rtol=3e-7, atol=1e-7
        )
    assert_is(tmp_path / "gpu", days)
    vocabularies = [
        inspect(tmp_path / engine / "workflow").vocabularies for engine in ("cpu", "gpu")
    ]
    assert vocabularies[0] == vocabularies[1]


def test_kernels_of_the_card_equal_the_cpu_engine_bit_by_bit(
    rapids: bool, client, tmp_path: Path
) -> None:
    """Criteo's format: CRLF, no last newline, a bad row, several blocks, pieces and row groups."""
    if not rapids:
        pytest.skip("tests/simulator rehearses it")
    raw = tmp_path / "raw"
    write_log(raw, [20_000, 20_000, 3_000], seed=4)
    for day, change in (
        (0, lambda text: text.replace(b"\n", b"\r\n")),
        (1, lambda text: text.removesuffix(b"\n")),
        (2, lambda text: text.replace(b"\t", b"\tx", 1)),
    ):
        path = raw / f"day_{day}"
        path.write_bytes(change(path.read_bytes()))
    options = {"block_mb": 1, "on_bad_rows": "quarantine"}
    run(settings(raw, tmp_path / "cpu", **options))
    run(settings(raw, tmp_path / "gpu", scheduler=client.scheduler.address, **options))
    trees = [tree(tmp_path / engine) for engine in ("cpu", "gpu")]
    for name in ("workflow/", "extension/", "rejected/"):
        own = [{k: v for k, v in files.items() if k.startswith(name)} for files in trees]
        assert own[0] == own[1]
    for split in SPLITS:
        pairs = [parts(tmp_path / engine, split) for engine in ("cpu", "gpu")]
        for expected, got in zip(*pairs, strict=True):
            assert pq.read_table(got).equals(pq.read_table(expected))
            footers = [pq.read_metadata(path) for path in (expected, got)]
            rows = [[f.row_group(i).num_rows for i in range(f.num_row_groups)] for f in footers]
            assert rows[0] == rows[1]
    assert not [finding for finding in check(tmp_path / "gpu") if finding.severity == "error"]


def test_workers_are_patched_and_have_gpus(client, rapids: bool) -> None:
    from nvt_torchrec.etl.engines.device import gpu_count

    def supplied() -> bool:
        import sys

        if "nvt_torchrec.nvt_compat" not in sys.modules:
            return False
        if "cudf" not in sys.modules:
            return True
        import cudf

        return hasattr(cudf.DataFrame, "from_pandas")

    assert all(client.run(supplied).values())
    assert all(bool(count) == rapids for count in client.run(gpu_count).values())


def test_the_memory_is_the_instances(rapids: bool) -> None:
    """PyTorch says the same of the GPU, or of the instance of one, that it was given."""
    if not rapids:
        pytest.skip("a CPU has no device memory")
    import torch

    from nvt_torchrec.etl.engines.device import gpu_memory

    assert gpu_memory() == torch.cuda.get_device_properties(0).total_memory


def test_spilling(rapids: bool, log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than the device limit: it goes to the host and comes back, and the run is right."""
    if not rapids:
        pytest.skip("a CPU has no device memory to spill")
    import cudf
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(cluster, "POOL_SHARE", 0.05)
    monkeypatch.setattr(cluster, "SPILL_SHARE", (64 << 20) / total)
    with cluster.local_cluster(1, tmp_path / "dask") as client:

        def frame(i: int):
            return cudf.DataFrame({"x": np.full(4 << 20, i, np.int64)})  # 32 MiB

        held = client.map(frame, range(16), pure=False)
        totals = client.gather(client.map(lambda part: int(part["x"].sum()), held, pure=False))
        assert totals == [i * (4 << 20) for i in range(16)]
        spilled = client.run(lambda dask_worker: len(dask_worker.data.host))
        assert sum(spilled.values()) > 0
        raw, days = log
        run(settings(raw, tmp_path / "out", scheduler=client.scheduler.address))
        assert_is(tmp_path / "out", days)


def test_all_gpus(rapids: bool, log, tmp_path: Path) -> None:
    """A worker for each, or for each MIG instance that CUDA_VISIBLE_DEVICES lists: same answer."""
    from nvt_torchrec.etl.engines.device import gpu_count

    if rapids and gpu_count() < 2:
        pytest.skip("one GPU")
    raw, days = log
    run(settings(raw, tmp_path / "out", engine="dask", workers=gpu_count() if rapids else 2))
    assert_is(tmp_path / "out", days)


def test_a_hash_is_of_the_value_on_the_device_too(rapids: bool) -> None:
    """As on the CPU (``tests/nvt_compat/test_lists.py``), whatever type holds the value."""
    if not rapids:
        pytest.skip("the CPU's hashes have their own tests")
    import cudf

    values = [0, 5, -7, 2**53, 5]
    expected = murmur3_int(np.array(values)).tolist()
    for dtype in ("int64", "float64"):
        series = cudf.Series(values, dtype=dtype)
        assert dispatch.hash_series(series).to_pandas().tolist() == expected
    small = cudf.Series([1, 2], dtype="int32")
    assert (
        dispatch.hash_series(small).to_pandas().tolist() == murmur3_int(np.array([1, 2])).tolist()
    )
    with pytest.raises(TypeError, match="no categories to hash"):
        dispatch.hash_series(cudf.Series([1.5]))


def test_slices_of_list_columns(rapids: bool) -> None:
    """Offsets of a slice begin at 0, and belong to its elements."""
    if not rapids:
        pytest.skip("pandas' lists have their own tests")
    import cudf

    whole = cudf.Series([[1, 2], [3], [], [4, 5, 6]])
    for series in (whole, whole.iloc[1:], whole.iloc[2:3], whole.iloc[4:]):
        values, offsets = dispatch.pull_apart_list(series)
        at, flat = offsets.to_pandas().tolist(), values.to_pandas().tolist()
        lists = [flat[a:b] for a, b in itertools.pairwise(at)]
        assert lists == [list(x) for x in series.to_pandas()]
        encoded = dispatch.encode_list_column(series, values.values * 10, dtype="int32")
        back = cudf.Series._from_column(encoded)
        assert [list(x) for x in back.to_pandas()] == [[10 * v for v in one] for one in lists]
