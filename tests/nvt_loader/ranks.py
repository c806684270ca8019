"""What each process of test_processes.py runs, under torchrun.

    ranks.py SPLIT OUTPUT GLOBAL_BATCH STEPS [STATE]

Takes up to STEPS steps of each of two epochs with a collective in every step, as training would;
rank 0 writes the rows of each global batch, and the loader's state in the middle of what was drawn.
Then the last rank takes one step of an epoch that the others finish: all must refuse its account.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader.helper import rows_of


def main(split: str, output: str, global_batch: int, steps: int, state: str = "") -> None:
    """Run one rank."""
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
        loader.load_state_dict(json.loads(Path(state).read_text()))
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
        Path(output).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
