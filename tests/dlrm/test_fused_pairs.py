"""The interaction as one Triton kernel, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import types

import pytest
import torch

from nvt_torchrec.base.device_check import DeviceError
from nvt_torchrec.dlrm import layers
from nvt_torchrec.dlrm.layers import PairProducts, choose_kernel
from tests.dlrm.runs import ROOT

CPU = torch.device("cpu")
#: Triton reads it when it is imported, so it is set for a process of its own.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="runs in test_under_tritons_interpreter's process"
)


in_this_process = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: it comes with PyTorch for CUDA",
)


@in_this_process
@needs_triton
def test_under_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@in_this_process
@needs_triton
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_compiles_for_nvidias_cards(tmp_path, architecture, dtype):
    """Which needs no card: the kernels for MLPerf's model, as far as machine code."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nvt_torchrec.dlrm.cuda import fused_pairs

    dense, sparse = (torch.empty(shape, device="meta") for shape in ((1, 128), (1, 26, 128)))
    constants = fused_pairs._constants(dense, sparse, dtype)
    target = GPUTarget("cuda", architecture, 32)
    other = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    for kernel in (fused_pairs._forward, fused_pairs._backward):
        pointers = {
            name: "*fp32" if name.startswith("sparse") else other
            for name in kernel.arg_names
            if name not in {"width", *constants}
        }
        types = {**pointers, "width": "i32", **dict.fromkeys(constants, "constexpr")}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, types, places)
        code = triton.compile(source, target=target).asm["ptx"]
        assert ("mma.sync" in code) == (dtype == torch.bfloat16)
        (tmp_path / "kernel.ptx").write_text(code)
        (machine,) = re.findall(r"^\.target (\w+)", code, re.MULTILINE)
        command = [knobs.nvidia.ptxas.path, f"-arch={machine}", "-v"]
        command += [str(tmp_path / "kernel.ptx"), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        assert "0 bytes spill stores" in said, f"it spills registers, or fails: {said}"


def results(
    interaction: PairProducts, dense: torch.Tensor, sparse: torch.Tensor, **autocast: object
) -> tuple[torch.Tensor, ...]:
    """The output and the gradients of some function of it."""
    given = [one for one in (dense, sparse) if one.requires_grad]
    with torch.autocast("cpu", torch.bfloat16, **autocast):
        out = interaction(dense, sparse)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return (out, *torch.autograd.grad(out, given, weights))


@interpreted
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("has_dense", [True, False])
@pytest.mark.parametrize(
    ("rows", "features", "dim"), [(3, 26, 128), (2, 2, 4), (2, 19, 20), (1, 40, 132), (0, 5, 8)]
)
def test_the_kernel_computes_what_the_operators_compute(rows, features, dim, has_dense, aligned):
    torch.manual_seed(0)
    dense = torch.randn(rows, dim if has_dense else 0, requires_grad=has_dense)
    sparse = torch.randn(rows, features, dim, requires_grad=True)
    interaction = PairProducts(features, dense=has_dense)
    interaction.aligned = aligned
    expected = results(interaction, dense, sparse, enabled=False)
    interaction.kernel = "triton"
    found = results(interaction, dense, sparse, enabled=False)
    assert found[0].shape[1] % 8 == 0 or not aligned
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


@interpreted
@pytest.mark.parametrize("lookup", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_dense", [True, False])
def test_the_kernel_in_bfloat16(has_dense, lookup):
    """It reads the lookup's output in its own type, and rounds once."""
    torch.manual_seed(0)
    dense = torch.randn(4, 32 if has_dense else 0).bfloat16().requires_grad_(has_dense)
    sparse = torch.randn(4, 6, 32).to(lookup).requires_grad_()
    interaction = PairProducts(6, dense=has_dense)
    expected = results(interaction, dense, sparse, enabled=True)
    interaction.kernel = "triton"
    found = results(interaction, dense, sparse, enabled=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.02, atol=0.05)


@in_this_process
@pytest.mark.parametrize("has_dense", [True, False])
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda out: out, None),
        (lambda out: out + 1.0, r"output\[0, 0\] is"),
        (lambda out: torch.cat((out[:, :1] * 1.5, out[:, 1:]), dim=1) * 1.0, "values differ"),
        (lambda out: out.detach().requires_grad_(), "RuntimeError"),  # no gradients
        (lambda out: out[:, 1:], "instead of float32"),
        (lambda out: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_samples_are_compared_with_the_host(monkeypatch, caplog, has_dense, fault, why):
    """A stand-in computes what the kernel should, with a fault."""

    def fused_pairs(dense, sparse, width):
        layer = PairProducts(sparse.shape[1], dense=has_dense)
        return fault(layer(sparse[:, 0, :0] if dense is None else dense, sparse))

    module = types.SimpleNamespace(fused_pairs=fused_pairs)
    monkeypatch.setitem(sys.modules, "nvt_torchrec.dlrm.cuda.fused_pairs", module)
    chosen = PairProducts(3, dense=has_dense)
    choose_kernel(chosen, CPU)
    assert chosen.kernel == "torch", "not on a CPU"
    monkeypatch.setattr(layers, "KERNEL_DEVICE", "cpu")
    choose_kernel(chosen, CPU)
    assert chosen.kernel == ("torch" if why else "triton")
    assert len(caplog.records) == bool(why)
    if why:
        assert re.search(f"dot products differs from the CPU's: .*{why}", caplog.text)
        with pytest.raises(DeviceError, match=why):
            choose_kernel(chosen, CPU, strict=True)
    choose_kernel(PairProducts(65), CPU, strict=True)


@in_this_process
@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_without_triton(monkeypatch, caplog):
    monkeypatch.setattr(layers, "KERNEL_DEVICE", "cpu")
    layer = PairProducts(3)
    choose_kernel(layer, CPU)
    assert layer.kernel == "torch"
    assert "No module named 'triton'" in caplog.text
