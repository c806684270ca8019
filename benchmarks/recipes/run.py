"""Run one recipe on a look-alike."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.recipes.lookalikes import LOOKALIKES
from benchmarks.recipes.pages import script

ROOT = Path(__file__).parents[2]
#: For logs a thousand times smaller than the real ones: fewer rows a step, and smaller layers.
_SMALLER = [(r"--batch_size \d+", "--batch_size 128")]
_SMALLER += [(r"--embedding_dim 128", "--embedding_dim 16"), (r"512,256,128", "512,256,16")]
_SMALLER += [(r"--dcn_low_rank_dim 512", "--dcn_low_rank_dim 32")]
_SMALLER += [(r"512,256,(\d+)\b", r"64,\1"), (r"1024,1024,64,1\b", "64,1")]
_METRICS = re.compile(r"^ *(valid|test) +[\d,]+ +[\d,]+ +(0\.\d+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a recipe did.

    Attributes:
        auroc: by split, of the trained model.
        printed: all output.
    """

    auroc: dict[str, float]
    printed: str


def run_recipe(name: str, directory: Path, rows: int, seed: int = 1) -> Outcome:
    """Write a look-alike to ``directory/RAW`` and execute the commands of the page there.

    Raises:
        RuntimeError: a command failed, or there were no metrics; the message is the output.
    """
    LOOKALIKES[name](directory / "RAW", rows, seed)
    (directory / "train_torchrec.py").symlink_to(ROOT / "train_torchrec.py")
    commands = script(name)
    for pattern, smaller in _SMALLER:
        commands = re.sub(pattern, smaller, commands)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-eu", "-c", commands],
        cwd=directory,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    auroc = {split: float(text) for split, text in _METRICS.findall(done.stdout)}
    if done.returncode or "test" not in auroc:
        raise RuntimeError(f"{name}: exit status {done.returncode}\n{done.stdout[-6000:]}")
    return Outcome(auroc, done.stdout)
