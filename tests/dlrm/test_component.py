"""The torchx component; that it trains on two machines, test_train.py shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from torchx import specs

from nvt_torchrec.dlrm.launch.component import train
from tests.dlrm.runs import ROOT, run_command

FLAGS = ["--binary_path", "/data/a $HOME; b", "--adagrad", "--log_path='x'"]


def _arguments(app: specs.AppDef, tmp_path, **environment: str) -> list[str]:
    """What torchrun is given when a scheduler runs the role's command."""
    (tmp_path / "torchrun").write_text(
        f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    )
    (tmp_path / "torchrun").chmod(0o755)
    values = specs.macros.Values("/image", "job-7", "0", "TORCHX_RANK0_HOST")
    role = values.apply(app.roles[0])
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    result = subprocess.run(
        [role.entrypoint, *role.args], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout)


def _value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_flags_reach_the_trainer_as_they_are(tmp_path):
    arguments = _arguments(train(*FLAGS), tmp_path)
    assert arguments[arguments.index("-m") :] == ["-m", "train_torchrec", *FLAGS]
    assert _value(arguments, "--rdzv-endpoint") == "localhost:0"
    assert _value(arguments, "--rdzv-id") == "job-7"


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [({"TORCHX_RANK0_HOST": "node3"}, "node3:2950"), ({}, "localhost:2950")],
)
def test_machines_meet_on_the_first(tmp_path, environment, endpoint):
    app = train(j="2x8", port=2950, max_restarts=3, gpu=8, env={"NCCL_DEBUG": "WARN"})
    arguments = _arguments(app, tmp_path, **environment)
    assert _value(arguments, "--rdzv-endpoint") == endpoint
    assert _value(arguments, "--nnodes") == "2"
    assert _value(arguments, "--nproc-per-node") == "8"
    assert _value(arguments, "--max-restarts") == "3"
    (role,) = app.roles
    assert (role.num_replicas, role.resource.gpu, role.env) == (2, 8, {"NCCL_DEBUG": "WARN"})


def test_slurm_takes_it():
    """As torchx's own check of components, and its command line, read it."""
    command = (
        "torchx run --dryrun -s slurm nvt_torchrec/dlrm/launch/component.py:train -j 2x8 --gpu 8"
    )
    result = run_command([*command.split(), "--cpu", "96", "--", *FLAGS], cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("--cpus-per-task=96 --mem=16384 --gpus-per-task=8") == 2
    assert "-m train_torchrec --binary_path " in result.stdout
