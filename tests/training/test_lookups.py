"""What FBGEMM is told: types of ids, sums and tables, and whether it checks ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.types import BoundsCheckMode

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.models.checkpoint.tensor_files import read_tensors
from nvt_torchrec.training.data.choices import read_schema
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.optim.combined import iterate_lookups
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.build import build
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.planning import make_sharder
from tests.training.runs import (
    EXAMPLE,
    EXAMPLE_SGD,
    MODEL,
    events,
    model_of,
    train_here,
    train_losses,
)
from tests.training.shapes import dlrm

SIZES = dlrm(("i",), ("a", "b"), (2**30, 2**30 - 1), 8, (8,), (8, 1), 0.0)
LARGER = dlrm(("i",), ("a", "b"), (2**30, 2**30), 8, (8,), (8, 1), 0.0)


def lookup_of(data, *flags: str):
    given = [*EXAMPLE_SGD, f"--binary_path={data}", "--batch_size=32", "--learning_rate=1", *flags]
    settings = parse_settings([*MODEL, *given])
    with process_group() as group:
        run, _ = build(settings, model_config(settings, read_schema(settings)), group)
        (lookup,) = iterate_lookups(run.model)
        return lookup


@pytest.mark.parametrize(("config", "ids"), [(SIZES, torch.int32), (LARGER, torch.int64)])
def test_ids_are_widened_where_rows_cannot_be_numbered_in_32_bits(config, ids):
    params = make_sharder(parse_settings([]), config).fused_params
    assert params["embedding_table_index_type"] == params["embedding_table_offset_type"] == ids


def test_fbgemm_gets_it(data):
    lookup = lookup_of(data)
    assert lookup.embedding_table_index_type == torch.int32
    assert lookup.bounds_check_mode_int == BoundsCheckMode.NONE.value
    assert lookup.output_dtype == SparseType.FP32.as_int()
    assert lookup.weights_precision == SparseType.FP32
    lookup = lookup_of(data, "--amp", "--table_precision=fp16")
    assert lookup.output_dtype == SparseType.FP32.as_int()
    assert lookup.weights_precision == SparseType.FP16
    assert lookup.stochastic_rounding


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad"])
def test_tables_in_float16(data, tmp_path, optimizer, caplog):
    """They are trained, saved, resumed bit by bit and served; optimizer state is float32."""
    same = [*EXAMPLE, f"--optimizer={optimizer}", "--learning_rate=0.02"]
    wide = train_losses(data, tmp_path / "wide", *same, "--max_steps=12")
    half = [*same, "--table_precision=fp16"]
    whole = train_losses(data, tmp_path / "whole", *half, "--max_steps=12")
    assert "rounds to the nearest" in caplog.text
    np.testing.assert_allclose(whole, wide, rtol=0, atol=2e-3)
    steps = [f"--checkpoint_dir={tmp_path / 'steps'}", "--checkpoint_freq=6"]
    train_losses(data, tmp_path / "first", *half, *steps, "--max_steps=6")
    train_losses(data, tmp_path / "resumed", *half, *steps, "--max_steps=12", "--resume")
    tensors = read_tensors(tmp_path / "whole" / "final")
    types = {name: one.dtype for name, one in tensors.items() if "t_cat_2" in name}
    (weight,) = [name for name in types if name.endswith("t_cat_2.weight")]
    assert types.pop(weight) == "float16"
    assert set(types.values()) == {"float32"}
    served = model_of(tmp_path / "whole" / "final")
    resumed = model_of(tmp_path / "resumed" / "final")
    for mine, theirs in zip(served.parameters(), resumed.parameters(), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)
    for table in served.sparse_arch.parameters():
        assert torch.equal(table, table.half().float())
    tested = [f"--load_checkpoint_path={tmp_path / 'whole' / 'final'}", "--mode=test"]
    where = [f"--binary_path={data}", "--batch_size=32", f"--log_path={tmp_path / 'test'}"]
    metrics = [train_here(*where, *tested, *flags).metrics["test"] for flags in (half, same)]
    evaluations = events(tmp_path / "whole" / "log", "evaluation")
    (trained,) = [one for one in evaluations if one["split"] == "test"]
    assert metrics[0] == metrics[1]
    assert metrics[0]["log_loss"] == pytest.approx(trained["log_loss"], abs=1e-7)
    with pytest.raises(SettingsError, match="table_precision was fp16, is fp32"):
        train_losses(data, tmp_path / "other", *same, *steps, "--resume")
