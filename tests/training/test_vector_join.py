"""Vectors that the module gets in parts, and lookups in bfloat16: what GPUs compute, on a CPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.models.head import build_head
from nvt_torchrec.training.launch.distributed import Group, process_group
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding import build, train_model
from nvt_torchrec.training.sharding.lookup_precision import FeatureSums, round_lookups
from tests.training.runs import MODEL, losses, small_run, train_here
from tests.training.shapes import dlrm

NAMES = ("a", "b", "c")
SIZES = (5, 5, 40)


def make_config(**changes):
    """A DLRM two of whose columns share a table."""
    config = dlrm(("i", "j"), NAMES, SIZES, 8, (16, 8), (16, 1))
    settings = {"vocabularies": ("shared", "shared", "c"), "first_order": 0.3, "vector_scale": 4.0}
    return dataclasses.replace(config, **(settings | changes))


def join_parts(patch: pytest.MonkeyPatch) -> None:
    """Let modules get their vectors in parts."""
    original = build.set_up_dense

    def set_up(head, device, settings):
        original(head, device, settings)
        head.join_on_gpu()
        assert head.vector_join

    patch.setattr(build, "set_up_dense", set_up)


def round_as_fbgemm(patch: pytest.MonkeyPatch) -> None:
    """Let lookups give bfloat16, as FBGEMM's do on GPUs; those on CPUs cannot."""
    order = train_model._OrderVectors.forward
    patch.setattr(train_model._OrderVectors, "forward", lambda *inputs: order(*inputs).bfloat16())
    patch.setattr(build, "round_lookups", lambda *_: True)


def give_bfloat16(plan, *_):
    """Let FBGEMM give bfloat16, also on a CPU, where it fails."""
    for tables in plan.plan.values():
        for table in tables.values():
            table.output_dtype = DataType.BF16
    return True


@pytest.mark.parametrize("bins", [0, 4])
@pytest.mark.parametrize("first_order", [0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_give_the_same_logits_and_gradients(bins, first_order, dtype, caplog):
    """Also of rounded vectors, whose sums of weights are given as they were before."""
    head = build_head(make_config(dense_bins=bins, first_order=first_order))
    torch.manual_seed(0)
    dense, vectors = torch.randn(9, 2), torch.randn(9, 3, 8)
    if first_order:
        torch.nn.init.normal_(head.first_order.weight)
        # So the linear term is seen alone where vectors are rounded.
        if dtype == torch.bfloat16:
            torch.nn.init.zeros_([*head.module.top][-1].weight)
    vectors.requires_grad_()
    parameters = [*head.parameters()]
    expected = head(dense, vectors)
    wanted = torch.autograd.grad(expected.square().sum(), [vectors, *parameters])

    head.join_on_gpu()
    given, sums = vectors.detach().to(dtype).requires_grad_(), None
    if first_order:
        with torch.no_grad():
            sums = head.first_order.sum_weights(vectors)
    logits = head(dense, given, feature_sums=sums)
    found = torch.autograd.grad(logits.square().sum(), [given, *parameters])
    assert found[0].dtype == dtype
    if first_order or dtype == torch.float32:
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for mine, theirs in zip(found, wanted, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(
            mine.float(), theirs, rtol=tolerance, atol=tolerance * max(scale, 1e-3)
        )
    message = "vectors are joined by PyTorch's operators, which takes longer"
    assert [record.message[: len(message)] for record in caplog.records] == [message]  # no GPU


@pytest.mark.parametrize("flags", [["--dense_bins=4"], ["--first_order=0", "--dense_bins=0"]])
def test_parts_train_the_same_losses(data, tmp_path, monkeypatch, flags):
    common = [*MODEL, "--adagrad", "--learning_rate=0.1", *flags]
    train_here(*small_run(data, tmp_path / "whole", *common))
    join_parts(monkeypatch)
    train_here(*small_run(data, tmp_path / "parts", *common))
    parts, whole = (losses(tmp_path / name / "log") for name in ("parts", "whole"))
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [(["--dense_bins=4"], 2e-3), (["--first_order=0", "--dense_bins=0"], 0)],
)
def test_lookups_in_bfloat16_train_the_same_losses(
    data, tmp_path, monkeypatch, caplog, flags, tolerance
):
    """Without a linear term to the last bit: the module rounds its vectors anyway.

    With one they are rounded before and after they are scaled, and so are gradients of its weights.
    """
    common = [*MODEL, "--adagrad", "--learning_rate=0.02", "--amp", *flags]
    common.append("--sharding=table_wise")
    train_here(*small_run(data, tmp_path / "whole", *common))
    join_parts(monkeypatch)
    round_as_fbgemm(monkeypatch)
    train_here(*small_run(data, tmp_path / "rounded", *common))
    rounded, whole = (losses(tmp_path / name / "log") for name in ("rounded", "whole"))
    np.testing.assert_allclose(rounded, whole, rtol=0, atol=tolerance)
    assert "lookups stay in float32" not in caplog.text


@pytest.mark.parametrize("failure", ["FBGEMM has none", "another table is read"])
def test_lookups_that_fail_stay_in_float32(data, tmp_path, monkeypatch, caplog, failure):
    common = [*MODEL, "--adagrad", "--learning_rate=0.02", "--amp", "--sharding=table_wise"]
    train_here(*small_run(data, tmp_path / "whole", *common))
    join_parts(monkeypatch)
    if failure == "FBGEMM has none":
        monkeypatch.setattr(build, "round_lookups", give_bfloat16)
    else:
        round_as_fbgemm(monkeypatch)
        look_up = FeatureSums.sum_coordinates
        monkeypatch.setattr(
            FeatureSums, "sum_coordinates", lambda *inputs: look_up(*inputs).roll(1, 0)
        )
    train_here(*small_run(data, tmp_path / "tried", *common))
    tried, whole = (losses(tmp_path / name / "log") for name in ("tried", "whole"))
    warnings = [record.message for record in caplog.records if "lookups stay" in record.message]
    assert len(warnings) == 1
    if failure == "FBGEMM has none":
        assert "not implemented for 'BFloat16'" in warnings[0]
        np.testing.assert_allclose(tried, whole, rtol=0, atol=1e-6)
    else:
        assert " off); please report this" in warnings[0]


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
@pytest.mark.parametrize("number_of_memories", [1, 2])
def test_sums_of_linear_weights_are_exact(labels, precision, number_of_memories):
    """Of lists, in rows that only pad, and of columns that share a table."""
    config = make_config(labels=("x", "y")[:labels])
    torch.manual_seed(0)
    memories = [torch.randn(600).to(precision) for _ in range(number_of_memories)]
    tables = {
        "t_shared": memories[0][40 : 40 + 5 * 8].view(5, 8),
        "t_c": memories[-1][120 : 120 + 40 * 8].view(40, 8),
    }
    lengths = torch.tensor([1, 2, 0, 1, 0, 3, 1, 1, 1, 0, 1, 4, 1, 1, 0])  # 5 rows a column
    counts = [int(part.sum()) for part in lengths.split(5)]
    ids = torch.cat([torch.randint(n, (count,)) for n, count in zip(SIZES, counts, strict=True)])
    features = KeyedJaggedTensor.from_lengths_sync([*NAMES], ids.int(), lengths.int())
    sums = FeatureSums(config)
    assert sums(features) is None
    sums.set_tables((name, table, (0, 0)) for name, table in tables.items())
    expected = torch.zeros(5, labels, dtype=torch.float64)
    for name, begin in zip(NAMES, (0, labels, 0), strict=True):
        table = tables[config.table_by_column[name]].double()
        for row, chosen in enumerate(features[name].to_dense()):
            expected[row] += table[chosen.long(), begin : begin + labels].sum(0)
    found = sums(features)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    empty = KeyedJaggedTensor.from_lengths_sync([*NAMES], ids[:0].int(), lengths[:0].int())
    assert sums(empty).shape == (0, labels)


def make_plan(**changes):
    table = {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [0]} | changes
    tables = {name: ParameterSharding(**table) for name in ("t_shared", "t_c")}
    return ShardingPlan({"sparse_arch": EmbeddingModuleShardingPlan(tables)})


@pytest.mark.parametrize(
    ("flags", "plan", "world_size", "device", "changes"),
    [
        (["--amp"], {}, 1, "cuda", {}),
        ([], {}, 1, "cuda", {}),
        (["--amp"], {}, 2, "cuda", {}),
        (["--amp"], {}, 1, "cpu", {}),
        (["--amp", "--compile_dense"], {}, 1, "cuda", {}),
        (["--amp", "--embedding_l2=1e-4"], {}, 1, "cuda", {}),
        (["--amp"], {"compute_kernel": "fused_uvm_caching"}, 1, "cuda", {}),
        (["--amp"], {"sharding_type": "column_wise"}, 1, "cuda", {}),
        (["--amp"], {}, 1, "cuda", {"dense": ()}),
    ],
)
def test_lookups_are_rounded_only_where_that_changes_nothing(
    flags, plan, world_size, device, changes
):
    config = make_config()
    if changes:
        config = dataclasses.replace(
            config, **changes, settings={**config.settings, "dense_arch_layer_sizes": []}
        )
    settings = parse_settings(["--binary_path=split", *flags])
    group = Group(0, world_size, 1, torch.device(device), cpu=None)
    head, made = build_head(config), make_plan(**plan)
    build.set_up_dense(head, torch.device(device), settings)
    is_rounded = round_lookups(made, head, config, settings, group)
    assert is_rounded == (
        flags == ["--amp"] and device == "cuda" and world_size == 1 and not plan and not changes
    )
    for table in made.plan["sparse_arch"].values():
        assert table.output_dtype == (DataType.BF16 if is_rounded else None)


def test_fbgemm_is_told_and_its_memory_is_read(monkeypatch):
    """Tables as TorchRec shards them: their output's type, and weights in FBGEMM's memory."""
    config = make_config()
    flags = ["--binary_path=split", "--sharding=table_wise", "--learning_rate=0.1"]
    settings = parse_settings([*flags, "--dense_learning_rate=0.1", "--optimizer=sgd"])
    monkeypatch.setattr(build, "round_lookups", give_bfloat16)
    monkeypatch.setattr(build, "try_lookups", lambda *_: True)
    with process_group() as group:
        run, _ = build.build(settings, config, group)
        model = run.model.module.model
        (lookup,) = model.sparse_arch.embedding_bag_collection._lookups
        (kernel,) = lookup._emb_modules
        assert kernel.emb_module.output_dtype == SparseType.BF16.as_int()
        kernel.emb_module.weights_host.data.normal_()  # after the sums were told where it lies
        lengths = torch.tensor([1, 1, 1, 1, 2, 0])
        ids = torch.tensor([4, 0, 1, 1, 39, 7], dtype=torch.int32)
        features = KeyedJaggedTensor.from_lengths_sync([*NAMES], ids, lengths.int())
        sums = model.feature_sums(features)
    weights = [table.detach() for table in kernel.emb_module.split_embedding_weights()]
    by_rows = {len(table): table for table in weights}
    shared, c = by_rows[5], by_rows[40]
    expected = torch.stack(
        [
            shared[4, 0] + shared[1, 1] + c[39, 0] + c[7, 0],
            shared[0, 0] + shared[1, 1],
        ]
    )
    torch.testing.assert_close(sums[:, 0], expected)
