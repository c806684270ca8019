"""Train with one system of :mod:`benchmarks.train` in this process; print its speed as JSON.

The trainers run unchanged, with their command lines. Both call ``progress`` of a pipeline
(TorchRec's, or ours for one rank) once per training step. The time between two calls is measured.
It is the whole cost of a step, including loading, learning rate and reports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import run_command
from nvt_torchrec.base.startup import prepare_torch

OURS = "ours"
DLRM_MAIN = "dlrm_main"
BARE = "bare loop"


#: Computations with a faster form for GPUs. Their plain forms are: bins by ``embedding`` and
#: ``lerp``; lookups in float32; vectors joined by operators (which implies lookups in float32).
PLAIN_FORMS = ("bins", "lookups", "join")


class Stamps:
    """The times at which training steps began: wall clock, and CPU time of all threads.

    Args:
        warm_up: The number of steps before the measured ones.
        steps: The number of measured steps.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        self._warm_up = warm_up
        self._end = warm_up + steps
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def take(self) -> None:
        """Record the begin of a step.

        At the begin and the end of the measured steps, first wait for a GPU to finish its work.
        """
        if len(self.wall) in (self._warm_up, self._end):
            from torch import cuda

            if cuda.is_available():
                cuda.synchronize()
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def summarize(self, batch_size: int) -> dict[str, Any]:
        """Return the speed of the measured steps."""
        if len(self.wall) <= self._end:
            raise RuntimeError(f"{len(self.wall)} steps began instead of {self._end + 1}")
        wall = self.wall[self._warm_up : self._end + 1]
        cpu = self.cpu[self._warm_up : self._end + 1]
        samples = (self._end - self._warm_up) * batch_size
        return {
            "samples_per_s": samples / (wall[-1] - wall[0]),
            "samples_per_cpu_s": samples / (cpu[-1] - cpu[0]),
            "step_ms": 1e3 * statistics.median(b - a for a, b in itertools.pairwise(wall)),
        }


def main() -> None:
    """Measure one system."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add = parser.add_argument
    add("system", choices=(OURS, DLRM_MAIN, BARE))
    add("--data", type=Path, required=True)
    add("--batch_size", type=int, default=2048)
    add("--warm_up", type=int, default=20)
    add("--steps", type=int, default=100)
    add("--checkout", type=Path, help="checkout of facebookresearch/dlrm")
    add("--plain", choices=PLAIN_FORMS, help="compute this without its faster form for GPUs")
    args, args.flags = parser.parse_known_args()
    prepare_torch()
    stamps = Stamps(args.warm_up, args.steps)
    if args.plain:
        _use_plain_form(args.plain)
    run = {OURS: _run_ours, DLRM_MAIN: _run_dlrm_main, BARE: _run_bare_loop}[args.system]
    run(args, stamps)
    print(json.dumps(stamps.summarize(args.batch_size)), flush=True)


#: The flags with which this project trains the same model, in the same way, as dlrm_main.
_EXAMPLE = ["--optimizer", "sgd", "--first_order", "0", "--dense_bins", "0", "--epochs", "1"]
_EXAMPLE += ["--lr_warmup_steps", "0", "--dense_decay", "0", "--eps", "1e-8"]


def _make_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of both programs; those of the command line come last and win."""
    values = {
        "learning_rate": "0.05",
        "batch_size": str(args.batch_size),
        "limit_train_batches": str(args.warm_up + args.steps + 1),
        "validation_freq_within_epoch": "10000",  # evaluations are not measured
        "limit_val_batches": "1",
        "limit_test_batches": "1",
    }
    flags = []
    for name, value in values.items():
        flags += [f"--{name}", value]
    return flags + args.flags


def _count_steps(stamps: Stamps, pipeline: type) -> None:
    """Patch the class ``pipeline`` so that it takes a stamp at each training step."""
    progress: Callable = pipeline.progress

    def take_stamp_and_progress(self: Any, batches: Any) -> Any:
        if self._model.training:
            stamps.take()
        return progress(self, batches)

    pipeline.progress = take_stamp_and_progress


def _draw_on_device() -> None:
    """Draw initial embeddings on the GPU itself: the CPU would take minutes for 97 GiB."""
    from torch import cuda

    from nvt_torchrec.training.sharding import build

    def fill(model: Any, config: object, seed: int) -> None:
        for _, shard, _ in build._iterate_shards(model):
            shard.uniform_(-0.01, 0.01)

    if cuda.is_available():
        build._fill_tables = fill


def _use_plain_form(name: str) -> None:
    """Replace the faster form for GPUs by the plain form of one of :data:`PLAIN_FORMS`."""
    from nvt_torchrec.models.head import Head
    from nvt_torchrec.models.piecewise import PiecewiseLinear
    from nvt_torchrec.training.sharding import build

    if name == "bins":
        PiecewiseLinear._sum_bags = PiecewiseLinear._interpolate_pairs
    elif name == "lookups":
        build.round_lookups = lambda *_: False
    else:
        Head.join_on_gpu = lambda _: None


def _run_ours(args: argparse.Namespace, stamps: Stamps) -> None:
    import train_torchrec
    from nvt_torchrec.training.sharding.build import OneRankPipeline

    _draw_on_device()
    _count_steps(stamps, OneRankPipeline)
    with tempfile.TemporaryDirectory() as log:
        flags = ["--binary_path", str(args.data / "split"), "--log_path", log]
        status = train_torchrec.main([*_EXAMPLE, *_make_flags(args), *flags])
    if status:
        sys.exit(status)


def _run_dlrm_main(args: argparse.Namespace, stamps: Stamps) -> None:
    """Run dlrm_main like ``torchx run … --script dlrm_main.py`` with one process."""
    from torchrec.distributed import TrainPipelineSparseDist

    script = args.checkout / "torchrec_dlrm" / "dlrm_main.py"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(one_process, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _count_steps(stamps, TrainPipelineSparseDist)
    data = ["--dataset_name", "criteo_kaggle"]
    data += ["--in_memory_binary_criteo_path", str(args.data / "npy")]
    sys.argv = [str(script), *_make_flags(args), *data]
    sys.path.insert(0, str(script.parent))  # the script imports modules of its directory
    runpy.run_path(str(script), run_name="__main__")


def _run_bare_loop(args: argparse.Namespace, stamps: Stamps) -> None:
    """Run forward, backward and optimizer of our model over one batch in memory."""
    from nvt_torchrec.training.data.choices import read_schema
    from nvt_torchrec.training.data.loaders import TrainBatch, make_loader
    from nvt_torchrec.training.launch.distributed import process_group
    from nvt_torchrec.training.optim.learning_rates import fill_rates
    from nvt_torchrec.training.settings.train_settings import parse_settings
    from nvt_torchrec.training.sharding.build import build
    from nvt_torchrec.training.sharding.model_config import model_config

    _draw_on_device()
    data = ["--binary_path", str(args.data / "split")]
    settings = parse_settings([*_EXAMPLE, *_make_flags(args), *data])
    config = model_config(settings, read_schema(settings))
    steps = args.warm_up + args.steps + 1
    settings = fill_rates(settings, config, args.batch_size, steps)
    with process_group() as group:
        run, _ = build(settings, config, group)
        loaded = next(iter(make_loader(settings, config, "train", group)))
        batch = TrainBatch.pad(loaded, args.batch_size, args.batch_size)
        for _ in range(steps):
            stamps.take()
            run.optimizer.zero_grad()
            loss, _ = run.model(batch)
            loss.backward()
            run.optimizer.step()


if __name__ == "__main__":
    sys.exit(run_command(main))
