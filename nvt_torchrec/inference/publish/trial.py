"""Try a bundle in a process of its own before it is served.

A bundle may hold a model of a stranger (:mod:`models.onnx_head`), which may take any time and
memory, or end the process. ``python -m nvt_torchrec.inference.publish.trial BUNDLE`` opens it and
scores its reference rows (:mod:`inference.model.reference`) within limits.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, ClickLogError

#: The memory that the process may take, without that for the files: PyTorch takes 0.3 GiB.
_MEMORY_BYTES = 4 << 30
#: The files may take this many times their size: a table may be mapped and converted.
_MEMORY_FACTOR = 3
#: The CPU seconds that the process may take, without those for the digests of the files.
_CPU_S = 120
#: The CPU seconds that it may take in addition for each GiB of the files.
_CPU_S_PER_GIB = 30
#: A process that waits for ever takes no CPU. It is ended after this many times its CPU seconds.
_WAIT_FACTOR = 10
#: Why a process ended, by the signal that ended it.
_REASONS = {
    signal.SIGXCPU: "it takes too long",
    signal.SIGKILL: "it takes too long, or the machine's memory",
}
_REMEDY = "do not serve it; make the bundle again from a checkpoint that you trust"


def try_bundle(bundle: Path) -> None:
    """Score a bundle's reference rows in a process of its own, with limits of memory and time.

    Raises:
        BadInputError: It is damaged, ends the process, takes too much time or memory, or gives
            other scores than when it was made.
    """
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    seconds = _CPU_S + _CPU_S_PER_GIB * (size >> 30)
    limits = {"memory": _MEMORY_BYTES + _MEMORY_FACTOR * size, "seconds": seconds}
    command = [sys.executable, "-m", __name__, str(bundle), json.dumps(limits)]
    # The process imports from where this one does, whatever its directory and Python's flags are.
    paths = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=_WAIT_FACTOR * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadInputError(
            f"{bundle}: scoring its reference rows does not end in {_WAIT_FACTOR * seconds} s",
            _REMEDY,
        ) from None
    if done.returncode == 0:
        return
    if done.returncode < 0:
        ended_by = signal.Signals(-done.returncode)
        reason = _REASONS.get(ended_by, "it ends the process that opens it")
        raise BadInputError(
            f"{bundle}: scoring its reference rows: {reason} ({ended_by.name})", _REMEDY
        )
    try:
        error = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        error = {"what": (done.stderr.strip() or "no reason").splitlines()[-1], "remedy": _REMEDY}
    raise BadInputError(str(error["what"]), str(error["remedy"]))


def main(argv: list[str]) -> int:
    """Score the reference rows of a bundle; print why it cannot be served."""
    bundle, limits = Path(argv[0]), json.loads(argv[1])
    # A limit of private memory, not of addresses: PyTorch reserves far more than it uses.
    resource.setrlimit(resource.RLIMIT_DATA, (limits["memory"], limits["memory"]))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["seconds"], limits["seconds"] + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from nvt_torchrec.base.startup import prepare_torch

    prepare_torch()
    import torch

    from nvt_torchrec.inference.model.bundle import read_bundle
    from nvt_torchrec.inference.model.reference import check_scores

    try:
        _, model = read_bundle(bundle, torch.device("cpu"), check=True)
        check_scores(bundle, model)
    except ClickLogError as error:
        print(json.dumps({"what": error.what, "remedy": error.remedy}))
        return 1
    except MemoryError:
        print(json.dumps({"what": f"{bundle}: it takes too much memory", "remedy": _REMEDY}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
