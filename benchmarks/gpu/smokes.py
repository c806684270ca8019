"""The first calls that this project makes of RAPIDS and FBGEMM on a GPU, each checked.

What fails here would fail everything behind it, so these run first, and say in seconds what is
wrong. Each compares its result with the one computed on the host.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.worker import GpuSettings, Result, check, seconds_of
from nvt_torchrec.clicklog.readers.raw import Block, find_days, read_block
from nvt_torchrec.clicklog.synthetic.log import SyntheticSettings, synthesize

CASE = "smoke"
_VALUES = 200_000


def dlpack(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Read parquet with libcudf, and hand a column to PyTorch by DLPack."""
    import cudf
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = np.arange(_VALUES, dtype=np.int32)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ids.parquet")
        pq.write_table(pa.table({"ids": values}), file, compression="none")

        def read() -> torch.Tensor:
            return torch.from_dlpack(cudf.read_parquet(file)["ids"].values)

        check(torch.equal(read().cpu(), torch.from_numpy(values)), "other ids than were written")
        yield _result(
            "parquet read by libcudf, as a tensor", seconds_of(read, device, args.seconds)
        )


def fbgemm(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Train one step of an embedding table, and compare the rows with the host's arithmetic."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        BoundsCheckMode,
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    cuda = device.type == "cuda"
    place = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
    # 200 rows and steps of 0.5 are exact in 16 bits; FBGEMM's CPU kernels have no bfloat16
    rows, dim, rate = 200, 128, 0.5
    half = SparseType.BF16 if cuda else SparseType.FP16
    plain = {"embedding_table_index_type": torch.int64}
    narrow = {
        "embedding_table_index_type": torch.int32,
        "embedding_table_offset_type": torch.int32,
        "bounds_check_mode": BoundsCheckMode.NONE,
    }
    for name, options in {
        "lookup": plain,
        "lookup by int32 ids, not checked": narrow,
        "lookup in 16 bits": {**narrow, "output_dtype": half},
        "lookup in float16 tables": {**narrow, "weights_precision": SparseType.FP16},
    }.items():
        table = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, place, compute)],
            optimizer=EmbOptimType.EXACT_SGD,
            learning_rate=rate,
            device=device,
            **options,
        )
        (weights,) = table.split_embedding_weights()
        with torch.no_grad():
            weights.copy_(torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, dim))
        ids = torch.arange(0, rows, 7, device=device, dtype=options["embedding_table_index_type"])
        offsets = torch.arange(len(ids) + 1, device=device, dtype=ids.dtype)
        pooled = table(ids, offsets)
        expected = ids.to(torch.float32)[:, None].expand(len(ids), dim)
        check(torch.equal(pooled.float(), expected), f"{name}: other rows")
        pooled.sum(dtype=torch.float32).backward()
        after = weights[ids.to(weights.device)].float()
        check(torch.allclose(after, expected.to(after.device) - rate), f"{name}: other weights")
        took = seconds_of(lambda: table(ids, offsets), device, args.seconds)  # noqa: B023
        yield _result(name, took)


def interaction(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Compare the dot products' kernel with PyTorch's operators, also in speed."""
    from nvt_torchrec.dlrm.layers import PairProducts, choose_kernel

    rows = min(args.batch_sizes) if device.type == "cuda" else 64
    layer = PairProducts(26).to(device)
    dense = torch.randn(rows, 128, device=device).bfloat16().requires_grad_()
    sparse = torch.randn(rows, 26, 128, device=device, requires_grad=True)
    gradient = torch.ones(rows, 128 + 351, device=device, dtype=torch.bfloat16)

    def step() -> object:
        return torch.autograd.grad(layer(dense, sparse), (dense, sparse), gradient)

    names = ["PyTorch's operators"]
    names += ["the kernel that a trial chose"] if device.type == "cuda" else []
    expected = layer(dense, sparse).float()
    for name in names:
        if name != names[0]:
            choose_kernel(layer, device)
        same = torch.allclose(layer(dense, sparse).float(), expected, rtol=0.02, atol=0.2)
        check(same, f"{name}: other dot products")
        took = seconds_of(step, device, args.seconds)
        yield _result(f"dot products by {name}", took) | {"rows_per_s": rows / took}


def encode(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Fit and transform one frame with NVTabular on cuDF: its groupby, join and normalization."""
    import nvt_torchrec.nvt_compat  # noqa: F401

    import nvtabular

    from nvt_torchrec.formats.spec.toml_file import load_spec
    from nvt_torchrec.workflows import build, to_frame

    spec = load_spec()
    with tempfile.TemporaryDirectory() as folder:
        synthesize(folder, SyntheticSettings(days=1, rows_per_day=20_000, cardinality_scale=0.05))
        (day,) = find_days(folder)
        rows = read_block(Block(day.path, 0, day.size, day.source), spec)
    ids = {}
    for gpu in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            frame = to_frame(rows, spec, gpu=gpu)
            workflow = build(spec, folder)
            workflow.fit(nvtabular.Dataset(frame, cpu=not gpu))
            found = workflow.transform(frame)[spec.categorical_names]
            ids[gpu] = (found.to_pandas() if gpu else found).to_numpy(np.int64)
            if gpu:
                took = seconds_of(lambda: workflow.transform(frame), device, args.seconds)  # noqa: B023
    check(np.array_equal(ids[True], ids[False]), "cuDF and pandas give other ids")
    yield _result("encode a frame", took) | {"rows_per_s": len(rows) / took}


def cluster(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Start the ETL's cluster with one worker, and run a task on it."""
    import time

    from nvt_torchrec.etl.engines.cluster import local_cluster
    from nvt_torchrec.etl.engines.hardware import gpu_count

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, local_cluster(1, Path(folder)) as client:
        took = time.perf_counter() - begin
        (seen,) = client.run(gpu_count).values()
        check(seen == (1 if device.type == "cuda" else 0), f"the worker sees {seen} GPUs")
        check(client.submit(sum, [1, 2]).result(timeout=60) == 3, "a task gives another result")
    yield _result("start a cluster of one worker", took)


def _result(system: str, seconds: float) -> Result:
    return {"system": system, "case": CASE, "ms": 1e3 * seconds}
