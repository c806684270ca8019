"""The ranks of a job, in the environment that torchrun gives them.

Starting them by torchrun takes longer than what they do; what torchrun does has tests of its own.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.shell import free_port
from tests.warm import ROOT, warm_python


def run_ranks(ranks: int, function: Callable, *arguments: object) -> None:
    """Call a function of a module as each rank; a rank that fails ends the others."""
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]  # also where a test changed directory
    place["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as directory:
        call, errors = Path(directory, "call"), Path(directory, "errors")
        call.write_bytes(pickle.dumps((function, arguments)))
        with open(errors, "w") as stderr:
            command = [warm_python(), "-m", "tests.ranks", str(call)]
            jobs = [
                subprocess.Popen(
                    command,
                    env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stderr=stderr,
                )
                for rank in range(ranks)
            ]
        while None in (statuses := [job.poll() for job in jobs]) and not any(statuses):
            time.sleep(0.02)
        for job in jobs:
            job.kill()
            job.wait()
        assert not any(statuses), errors.read_text()


if __name__ == "__main__":
    function, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    function(*arguments)
