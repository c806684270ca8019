"""What FBGEMM is told: types of ids, sums and tables, and whether it checks ids."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.types import BoundsCheckMode
from torchrec.modules.embedding_configs import DataType

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.dlrm.build import build
from nvt_torchrec.dlrm.checkpoint.store import load_model
from nvt_torchrec.dlrm.checkpoint.tensors import read_tensors
from nvt_torchrec.dlrm.config import ModelConfig, model_config
from nvt_torchrec.dlrm.data import read_schema
from nvt_torchrec.dlrm.interactions import LowRankCross
from nvt_torchrec.dlrm.launch.distributed import process_group
from nvt_torchrec.dlrm.optim.adam import lookups_of
from nvt_torchrec.dlrm.settings.train_settings import parse_settings
from nvt_torchrec.dlrm.sharding import lookups
from nvt_torchrec.dlrm.sharding.planning import plan_only
from tests.dlrm.runs import MODEL, events, losses, train_here

SIZES = ModelConfig(("i",), ("a", "b"), (2**30, 2**30 - 1), 8, (8,), (8, 1))
LARGER = ModelConfig(("i",), ("a", "b"), (2**30, 2**30), 8, (8,), (8, 1))
CROSSED = ModelConfig(("i",), ("a",), (9,), 8, (8,), (8, 1), interaction=LowRankCross(1, 4))


def lookup_of(data, *flags: str):
    given = [f"--binary_path={data}", "--batch_size=32", "--learning_rate=1", *flags]
    settings = parse_settings([*MODEL, *given])
    with process_group() as group:
        model, _, _ = build(settings, model_config(settings, read_schema(settings)), group)
        (found,) = lookups_of(model)
        return found


def train(data, log, *flags: str) -> list[float]:
    common = [f"--binary_path={data}", f"--log_path={log}", "--batch_size=32", "--adagrad"]
    train_here(*common, "--learning_rate=0.1", *flags)
    return losses(log)


@pytest.mark.parametrize(
    ("config", "cached", "ids"),
    [
        (SIZES, False, torch.int32),
        (LARGER, False, torch.int64),
        (SIZES, True, torch.int64),
    ],
)
def test_ids_are_widened_where_rows_cannot_be_numbered_in_32_bits(config, cached, ids):
    found = lookups.fused_params(parse_settings([]), config, cached=cached)
    assert found["embedding_table_index_type"] == found["embedding_table_offset_type"] == ids


@pytest.mark.parametrize(
    ("flags", "config", "device", "ranks", "expected"),
    [
        ("--amp", SIZES, "cuda", 1, DataType.BF16),
        ("", SIZES, "cuda", 1, None),
        ("--amp", SIZES, "cpu", 1, None),
        ("--amp", SIZES, "cuda", 2, None),
        ("--amp", CROSSED, "cuda", 1, None),
        ("--amp --table_precision=fp16", SIZES, "cuda", 1, DataType.BF16),
        ("--table_precision=fp16", SIZES, "cuda", 1, DataType.FP32),
    ],
)
def test_lookups_in_bfloat16(flags, config, device, ranks, expected):
    """Only where the dot products round to it first of all."""
    settings = parse_settings(flags.split())
    assert lookups.output_type(settings, config, device, ranks) == expected


def test_fbgemm_gets_it(data, monkeypatch):
    found = lookup_of(data)
    assert found.embedding_table_index_type == torch.int32
    assert found.bounds_check_mode_int == BoundsCheckMode.NONE.value
    assert found.output_dtype == SparseType.FP32.as_int()
    assert found.weights_precision == SparseType.FP32
    # as on a GPU, but in float16: FBGEMM's CPU kernels have no bfloat16
    monkeypatch.setattr(lookups, "HALF_LOOKUPS", {"cpu": DataType.FP16})
    found = lookup_of(data, "--amp", "--table_precision=fp16")
    assert found.output_dtype == SparseType.FP16.as_int()
    assert found.weights_precision == SparseType.FP16
    assert found.stochastic_rounding


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "adam"])
def test_tables_in_float16(data, tmp_path, optimizer, caplog):
    """They are trained, saved, resumed bit by bit and served; optimizer state is float32."""
    same = [f"--binary_path={data}", "--batch_size=32", f"--optimizer={optimizer}"]
    same += ["--learning_rate=0.02"]
    train_here(*same, f"--log_path={tmp_path / 'wide'}", "--max_steps=12")
    half = [*same, "--table_precision=fp16"]
    kept = f"--save_checkpoint_path={tmp_path}"
    train_here(*half, f"--log_path={tmp_path / 'log'}", f"{kept}/whole", "--max_steps=12")
    assert "rounds to the nearest" in caplog.text
    np.testing.assert_allclose(
        losses(tmp_path / "log"), losses(tmp_path / "wide"), rtol=0, atol=2e-3
    )
    steps = [f"--checkpoint_dir={tmp_path / 'steps'}", "--checkpoint_freq=6"]
    train_here(*half, *steps, "--max_steps=6")
    train_here(*half, *steps, "--max_steps=12", "--resume", f"{kept}/resumed")
    tensors = read_tensors(tmp_path / "whole")
    types = {name: one.dtype for name, one in tensors.items() if "t_cat_2" in name}
    (weight,) = [name for name in types if name.endswith("t_cat_2.weight")]
    assert types.pop(weight) == "float16"
    assert set(types.values()) == {"float32"}
    served, _ = load_model(tmp_path / "whole")
    resumed, _ = load_model(tmp_path / "resumed")
    for mine, theirs in zip(served.parameters(), resumed.parameters(), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)
    assert torch.equal(served.tables, served.tables.half().float())
    tested = [f"--load_checkpoint_path={tmp_path / 'whole'}", "--mode=test"]
    found = []
    for name, flags in (("as16", half), ("as32", same)):
        found.append(train_here(*flags, *tested, f"--log_path={tmp_path / name}").metrics["test"])
    (trained,) = [one for one in events(tmp_path / "log", "evaluation") if one["split"] == "test"]
    assert found[0] == found[1]
    assert found[0].log_loss == pytest.approx(trained["log_loss"], abs=1e-7)
    with pytest.raises(SettingsError, match="table_precision was fp16, is fp32"):
        train_here(*same, *steps, "--resume")


@pytest.mark.parametrize(("optimizer", "state"), [("sgd", 0), ("adagrad", 4), ("adam", 8)])
def test_the_plan_knows_how_much_they_take(optimizer, state):
    """Two bytes a weight, and the state of the optimizer in float32."""
    flags = ["--plan_only=1", "--binary_path=/nowhere", "--num_embeddings_per_feature=9000000,4"]
    flags += [f"--optimizer={optimizer}", "--embedding_dim=64", "--dense_arch_layer_sizes=64"]
    sizes = []
    for precision in ("fp32", "fp16"):
        text = plan_only(parse_settings([*flags, f"--table_precision={precision}"]))
        sizes.append(float(re.search(r"GiB per rank: ([\d.]+);", text)[1]))
    weights = 9e6 * 64 / 2**30
    assert sizes[0] == pytest.approx(weights * (4 + state), abs=0.02)
    assert sizes[1] == pytest.approx(weights * (2 + state), abs=0.02)
