"""Sharding plans: for GPUs that are not there, with constraints, and when tables do not fit."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.build import _find_hardware
from nvt_torchrec.training.sharding.plan_only import plan_only
from tests.training.runs import (
    EXAMPLE_SGD,
    ROOT,
    losses,
    passed,
    run_command,
    small_run,
    train_many,
    train_script,
)

#: Table sizes of MLPerf's DLRM: ids hashed to 40 M at most.
MLPERF = (
    "40000000,39060,17295,7424,20265,3,7122,1543,63,40000000,3067956,405282,10,2209,11938,155,4,"
    "976,14,40000000,40000000,40000000,590152,12973,108,36"
)
#: Criteo's 1 TB log without a cap: 420 GiB of weights at dimension 128.
FULL = (
    "227605432,39060,17295,7424,20265,3,7122,1543,63,130229467,3067956,405282,10,2209,11938,155,4,"
    "976,14,292775614,40790948,187188510,590152,12973,108,36"
)


def _plan(*flags: str, gpus: int = 1) -> str:
    return plan_only(parse_settings([f"--plan_only={gpus}", "--binary_path=/nowhere", *flags]))


def _per_rank(text: str) -> list[float]:
    line = re.search(r"GiB per rank: ([\d. ]+);", text)
    return [float(gib) for gib in line[1].split()]


def test_loaders_share_a_gpu_with_the_tables(monkeypatch):
    """A plan has the rest, unless it is told how much memory there is."""
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=8 << 30)
    )
    group = Group(0, 1, 1, torch.device("cuda", 0), None)
    settings = parse_settings([])
    assert _find_hardware(settings, group, 0).memory == 8 << 30
    assert _find_hardware(settings, group, 3 << 30).memory == 5 << 30
    assert _find_hardware(parse_settings(["--hbm_gib=4"]), group, 3 << 30).memory == 4 << 30
    with pytest.raises(SettingsError, match=r"loaders need 9\.0 GiB of a GPU with 8\.0 GiB"):
        _find_hardware(settings, group, 9 << 30)


def test_the_plan_that_the_page_of_gpus_names():
    page = (ROOT / "docs" / "gpu.md").read_text()
    flags = re.search(r"nvt-train --plan_only 1 (.*)", page)[1]
    tables = re.search(r"TABLES=([\d,]+)", page)[1]
    text = _plan(*flags.replace("$TABLES", tables).split())
    said = re.search(r"the plan says\s+([\d.]+) of 104.8 GiB", page)[1]
    assert _per_rank(text) == [pytest.approx(float(said), abs=0.1)]
    assert "104.8 of it for tables" in text


def test_full_size_is_cut_by_rows_to_fit():
    flags = [f"--num_embeddings_per_feature={FULL}", "--adagrad", "--batch_size=8192"]
    text = _plan(*flags, "--hbm_gib=80", gpus=8)
    assert "all tables fit" in text
    assert max(_per_rank(text)) < 60
    assert 420 < sum(_per_rank(text)) < 440
    assert re.search(r"t_cat_19 +292,775,614 .*row_wise +fused +0,1,2,3,4,5,6,7", text)


def test_too_large_for_the_gpus_is_cached_there_and_logged():
    text = _plan(f"--num_embeddings_per_feature={MLPERF}", "--hbm_gib=80")
    assert re.search(r"tables do not fit into GPU memory: .* t_cat_0", text)
    assert "fused_uvm_caching" in text


def test_too_large_for_everything():
    with pytest.raises(SettingsError, match=r"the 26 tables \(420\.\d GiB of weights\) do not fit"):
        _plan(f"--num_embeddings_per_feature={FULL}", "--hbm_gib=16", gpus=2)


def test_plan_only_from_the_command_line(data):
    result = passed(run_command(train_script(f"--binary_path={data}", "--plan_only=2")))
    assert result.stdout.count("t_cat_") == 4


def test_plan_only_without_data_or_sizes():
    with pytest.raises(BadInputError, match=r"/nowhere"):
        _plan()


def test_communication_in_less_precision(data, tmp_path):
    """Quantized on the way between ranks: close to full precision, but not the same."""

    def run(precision: str) -> list[str]:
        flags = [*EXAMPLE_SGD, "--learning_rate=0.3", f"--comm_precision={precision}"]
        return small_run(data, tmp_path / precision, *flags, batch_size=16)

    train_many([run("fp32"), run("fp16"), run("bf16")], 2)
    full = losses(tmp_path / "fp32" / "log")
    for precision, tolerance in (("fp16", 1e-3), ("bf16", 1e-2)):
        curve = losses(tmp_path / precision / "log")
        assert curve == pytest.approx(full, abs=tolerance)
        assert curve != full
