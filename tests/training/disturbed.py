"""The trainer, disturbed: ``disturbed.py HOW STEP DIRECTORY FLAGS``, by torchrun.

In the first process of rank 1, something happens at a step (from 0): ``killed`` by SIGKILL, its
optimizer ``fails``, or its loader ``ends``. ``waits``: all ranks wait at the step until the
directory has a file ``go``. Each rank writes process and step to its file in the directory, a line
a step.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import torchrec  # noqa: F401  # before the loader

import train_torchrec
from nvt_torchrec.training.data import loaders as data
from nvt_torchrec.training.loop import train_steps

how, at, directory, *flags = sys.argv[1:]
place = Path(directory, os.environ["RANK"])
place.parent.mkdir(exist_ok=True)
disturbed = os.environ["RANK"] == "1" and not place.exists()
original, counted = train_steps.set_learning_rate, itertools.count()


class Loader(data.KJTLoader):
    def __iter__(self):
        ends = disturbed and how == "ends"
        return itertools.islice(super().__iter__(), int(at) if ends else None)


def fail(closure=None):
    raise RuntimeError("the weights are on fire")


def set_learning_rate(optimizer, rates):
    step = next(counted)
    with place.open("a") as file:
        file.write(f"{os.getpid()} {step}\n")
    original(optimizer, rates)
    if disturbed and step == int(at):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fails":
            optimizer.step = fail
    while how == "waits" and step == int(at) and not place.with_name("go").exists():
        time.sleep(0.01)


data.KJTLoader, train_steps.set_learning_rate = Loader, set_learning_rate
if __name__ == "__main__":
    sys.exit(train_torchrec.main(flags))
