"""Resumed runs of which only rank 1 cannot load the checkpoint; each rank writes its errors."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SettingsError
from nvt_torchrec.dlrm.checkpoint import tensors
from nvt_torchrec.dlrm.checkpoint.state import on_all_ranks
from nvt_torchrec.dlrm.launch.distributed import process_group
from nvt_torchrec.dlrm.settings.train_settings import parse_settings
from nvt_torchrec.dlrm.train import train
from nvt_torchrec.nvt_loader import KJTLoader
from tests.dlrm.runs import MODEL

#: What fails on rank 1, and with what.
CASES = [
    (KJTLoader, "load_state_dict", SettingsError("another batch size")),
    (KJTLoader, "load_state_dict", KeyError("epoch")),
    (tensors, "read_chunk", torch.OutOfMemoryError("CUDA out of memory")),
    (DistributedModelParallel, "load_state_dict", RuntimeError("size mismatch")),
]


def main(path: Path, *flags: str) -> None:
    """Write each rank's errors, a line each."""
    settings = parse_settings([*MODEL, *flags])
    with process_group() as group, pytest.MonkeyPatch.context() as patch:

        def failing(error: Exception):
            def fail(*args, **kwargs):
                raise error

            return fail

        def attempt(function, *args) -> None:
            try:
                function(*args)
            except (ClickLogError, RuntimeError) as found:
                what = found.what if isinstance(found, ClickLogError) else found
                with (path / str(group.rank)).open("a") as file:
                    file.write(f"{type(found).__name__}: {what}\n")

        def succeed() -> None:
            pass

        for error in (OSError(errno.EIO, "Input/output error"), BadInputError("gone")):
            function = failing(error) if group.rank == 1 else succeed
            attempt(on_all_ranks, group, path, function)
        for kind, method, error in CASES:
            with patch.context() as one:
                if group.rank == 1:
                    one.setattr(kind, method, failing(error))
                attempt(train, settings, group)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
