"""What each process of test_processes.py runs."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader.helper import rows_of


def draw(
    split: Path, output: Path, global_batch: int, steps: int, state: dict | None = None
) -> None:
    """Take steps of each of two epochs with a collective in every step, as training would.

    Rank 0 writes the rows of each global batch, and the loader's state in the middle of what was
    drawn. Then the last rank takes one step of an epoch that the others finish: all must refuse its
    account.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    loader = KJTLoader(
        split,
        global_batch // world_size,
        rank=rank,
        world_size=world_size,
        shuffle=True,
        device="cpu",
    )
    if state:
        loader.load_state_dict(state)
    found = {"epochs": [], "steps": len(loader)}
    for _ in range(2):
        taken = []
        for step, batch in enumerate(loader):
            ranks: list = [None] * world_size
            dist.all_gather_object(ranks, (step, rows_of([batch])))  # hangs if one has left
            assert {at for at, _ in ranks} == {step}
            taken.append([row for _, rows in ranks for row in rows])
            if len(taken) == steps:
                # two batches were drawn that were not trained, as a pipeline does
                found["state"] = loader.state_dict(trained_steps=loader.state_dict()["step"] - 2)
                break
        else:
            loader.check_epoch()
        found["epochs"].append(taken)
    for _ in loader:
        if rank == world_size - 1:
            break
    try:
        loader.check_epoch()
        refusal = ""
    except SchemaError as error:
        refusal = error.what
    found["refusals"] = [None] * world_size
    dist.all_gather_object(found["refusals"], refusal)
    if rank == 0:
        output.write_text(json.dumps(found))
    dist.destroy_process_group()
