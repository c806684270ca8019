"""A process for each rank, forked from one that has imported the trainer.

Starting them by torchrun takes eight seconds of CPU; what torchrun does has tests of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

from torch.multiprocessing import start_processes

from tests.shell import free_port


def run_ranks(ranks: int, function: Callable, *arguments: object) -> None:
    """Call a function of a module as each rank, in the environment that torchrun gives.

    A rank that fails ends the others, and its error is raised with its traceback.
    """
    multiprocessing.set_forkserver_preload(["nvt_torchrec.training.loop.train"])
    start_processes(
        _run, (ranks, free_port(), function, arguments), ranks, start_method="forkserver"
    )


def _run(rank: int, ranks: int, port: str, function: Callable, arguments: tuple) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="localhost")
    function(*arguments)
