"""Try a bundle in a separate process before it is served.

A bundle may contain a stranger's model (:mod:`models.onnx_head`), which may take any amount of time
and memory, or crash the process. ``python -m nvt_torchrec.inference.publish.trial BUNDLE LIMITS``
opens the bundle and scores its reference rows (:mod:`inference.model.reference`) within limits.
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

#: The memory limit of the process, in addition to memory for the files: PyTorch takes 0.3 GiB.
_MEMORY_BYTES = 4 << 30
#: The memory limit for the files, as a multiple of their size: a table is mapped and converted.
_MEMORY_FACTOR = 3
#: The limit of CPU seconds, in addition to the time for the digests of the files.
_CPU_S = 120
#: The CPU seconds for the digests, for each GiB of the files.
_CPU_S_PER_GIB = 30
#: A process that waits for ever uses no CPU time. It is killed after this multiple of its limit.
_WAIT_FACTOR = 10
#: Signal that ended the process → reason.
_REASONS = {
    signal.SIGXCPU: "it takes too long",
    signal.SIGKILL: "it takes too long or too much memory",
}
_REMEDY = "do not serve it; make the bundle again from a checkpoint that you trust"


def try_bundle(bundle: Path) -> None:
    """Score a bundle's reference rows in a separate process with limited memory and time.

    Raises:
        BadInputError: The bundle is damaged, crashes the process, takes too much time or memory, or
            gives other scores than at the time it was made.
    """
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    seconds = _CPU_S + _CPU_S_PER_GIB * (size >> 30)
    limits = {"memory": _MEMORY_BYTES + _MEMORY_FACTOR * size, "seconds": seconds}
    command = [sys.executable, "-m", __name__, str(bundle), json.dumps(limits)]
    # The process imports modules from the same paths as this one, whatever its working directory
    # and Python's flags are.
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
            f"{bundle}: scoring its reference rows takes more than {_WAIT_FACTOR * seconds} s",
            _REMEDY,
        ) from None
    if done.returncode == 0:
        return
    if done.returncode < 0:
        ended_by = signal.Signals(-done.returncode)
        reason = _REASONS.get(ended_by, "it crashes the process that opens it")
        raise BadInputError(
            f"{bundle}: scoring its reference rows failed: {reason} ({ended_by.name})", _REMEDY
        )
    try:
        error = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        error = {"what": (done.stderr.strip() or "no reason").splitlines()[-1], "remedy": _REMEDY}
    raise BadInputError(str(error["what"]), str(error["remedy"]))


def main(argv: list[str]) -> int:
    """Score the reference rows of a bundle; print an error as JSON if it cannot be served.

    Args:
        argv: The bundle, and the limits as JSON.
    """
    bundle = Path(argv[0])
    limits = json.loads(argv[1])
    # RLIMIT_DATA limits private memory. RLIMIT_AS would limit addresses, of which PyTorch reserves
    # far more than it uses.
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
