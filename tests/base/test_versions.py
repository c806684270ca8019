"""The table of supported packages, against made-up installations and the lock files."""

import pickle
from pathlib import Path

import pytest

import nvt_torchrec
from nvt_torchrec.base import versions
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.versions import UnsupportedStackError, check_etl_stack, check_training_stack
from tests.shell import python

REQUIREMENTS = Path(__file__).parents[2] / "requirements"

TRAINING = {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"}
ETL = {
    "nvtabular": "23.8.0",
    "merlin-core": "23.08.00",
    "merlin-dataloader": "23.8.0",
    "dask": "2026.7.1",
    "distributed": "2026.7.1",
    "pandas": "3.0.6",
    "numpy": "2.4.6",
}


def refusal(check, installed):
    with pytest.raises(UnsupportedStackError) as caught:
        check(installed.get)
    error = caught.value
    assert isinstance(error, ClickLogError | ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert error.remedy.startswith("run `")
    return f"{error.what}; {error.remedy}"


@pytest.mark.parametrize(
    "installed",
    [
        TRAINING,
        {"torch": "2.13.1+cu130", "fbgemm-gpu": "1.8.0", "torchrec": "1.8.0"},
        {"torch": "2.11.0", "fbgemm-gpu": "1.6.0", "torchrec": "1.6.1"},
        {"torch": "2.11.0a0+gitab12", "fbgemm-gpu": "1.6.0+cu130", "torchrec": "1.6"},
    ],
)
def test_each_supported_training_row_passes(installed):
    check_training_stack(installed.get)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("torch", "2.11.0"),  # each supported, but not together
        ("torch", "2.130.0"),
        ("torch", "2"),
        ("torchrec", "1.6.1"),
        ("fbgemm-gpu-cpu", "1.6.0"),
        ("torchrec", "1.80.0"),
    ],
)
def test_a_mix_of_training_rows_is_refused(name, wrong):
    message = refusal(check_training_stack, TRAINING | {name: wrong})
    assert f"{name} {wrong}" in message.partition("supported:")[0]
    assert "torch 2.13 + fbgemm-gpu-cpu 1.8 + torchrec 1.8, or torch 2.11" in message
    assert "--no-deps --no-build-isolation -r requirements/cpu.txt`" in message


def test_both_builds_of_fbgemm_are_refused_and_removed_first():
    message = refusal(check_training_stack, TRAINING | {"fbgemm-gpu": "1.8.0"})
    assert "fbgemm-gpu-cpu 1.8.0" in message
    assert "fbgemm-gpu 1.8.0" in message
    assert "`pip uninstall --yes fbgemm-gpu fbgemm-gpu-cpu && pip install" in message
    assert "requirements/gpu.txt`" in message


@pytest.mark.parametrize("name", [*versions.ETL, *versions.RAPIDS])
def test_each_etl_package_is_needed_in_its_version(name):
    if name in versions.RAPIDS:  # where it is installed
        message = refusal(check_etl_stack, ETL | {"cudf-cu13": "26.10.2"} | {name: "26.6.0"})
        assert f"found {name} 26.6.0; supported: {name} 26.10;" in message
        assert "requirements/gpu.txt`" in message
        return
    message = refusal(check_etl_stack, {k: v for k, v in ETL.items() if k != name})
    assert f"found no {name}; supported: {name} {versions.ETL[name]};" in message
    message = refusal(check_etl_stack, ETL | {name: "1.5.3"})
    assert f"found {name} 1.5.3; supported: {name} {versions.ETL[name]};" in message


@pytest.mark.parametrize("lock", ["cpu.txt", "gpu.txt"])
def test_the_locks_are_a_supported_stack(lock):
    lines = f"{(REQUIREMENTS / lock).read_text()}\n{(REQUIREMENTS / 'torch.txt').read_text()}"
    locked = dict(line.split("==") for line in lines.split() if "==" in line and line[0] != "#")
    check_etl_stack(locked.get)
    check_training_stack(locked.get)
    assert ("cudf-cu13" in locked) == (lock == "gpu.txt")


@pytest.mark.parametrize(
    ("blocked", "extra", "code"),
    [
        ("torchrec", "cpu", "from nvt_torchrec.nvt_loader import KJTLoader"),
        ("torch", "serve", "from nvt_torchrec import Predictor"),
        ("sklearn", "estimator", "from nvt_torchrec import ClickModel"),
        ("torchrec", "cpu", "from nvt_torchrec import Encoder; Encoder.encode(None, [])"),
        ("uvicorn", "serve", "from nvt_torchrec.inference.__main__ import main; "
         "sys.exit(main(['serve', '--bundle', 'x']))"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_the_smallest_extra_that_has_it(blocked, extra, code):
    """Where only the wheel is installed."""
    wheel = "from nvt_torchrec.base import versions; versions.IS_CHECKOUT = False"
    result = python("-c", f"import sys; {wheel}; sys.modules[{blocked!r}] = None; {code}")
    assert result.returncode
    remedy = f"run `pip install '/PATH/OF/nvt_torchrec-….whl[{extra}]'"
    assert f"the package {blocked} is not installed\n  -> {remedy}" in result.stderr
    assert "ModuleNotFoundError" not in result.stderr


@pytest.mark.parametrize(
    ("blocked", "left_out"),
    [
        (["sklearn"], {"ClickModel"}),  # of the extras but [estimator]
        (["torchrec", "sklearn"], {"ClickModel", "KJTLoader", "train"}),  # [serve]
        (["torch", "sklearn"],  # base
         {"ClickModel", "Encoder", "KJTLoader", "Predictor", "Scorer", "train"}),
    ],
)  # fmt: skip
def test_a_star_import_gives_what_is_installed(blocked, left_out):
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked}))"
    code = f"{block}\nfrom nvt_torchrec import *\nprint(*globals())"
    result = python("-c", code)
    assert not result.returncode, result.stderr
    names = set(nvt_torchrec._MODULES)
    assert names & set(result.stdout.split()) == names - left_out
