"""Train like ``train_torchrec.py``, but with ranks that share one GPU, to check collectives.

NCCL 2.30 or newer lets several ranks use one GPU with ``NCCL_MULTI_RANK_GPU_ENABLE=1``. The results
are right; the speed is meaningless. With ``FORCE_PIPELINE=1`` a single rank uses TorchRec's
pipeline, as several ranks do.

    torchrun --standalone --nproc-per-node 2 benchmarks/shared_gpu.py FLAGS

This program has not run on a GPU yet.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torchrec.distributed import TrainPipelineSparseDist

import train_torchrec
from nvt_torchrec.training.launch import distributed
from nvt_torchrec.training.launch.run_state import RunState
from nvt_torchrec.training.loop import trainer


def _choose_first_gpu(*_: Any) -> torch.device:
    return torch.device("cuda", 0)


def _make_torchrec_pipeline(run: RunState) -> TrainPipelineSparseDist:
    return TrainPipelineSparseDist(run.model, run.optimizer, run.group.device)


def main() -> int:
    """Train with the flags of the command line."""
    if torch.cuda.is_available():
        distributed.choose_gpu = _choose_first_gpu
    if os.environ.get("FORCE_PIPELINE"):
        trainer.make_pipeline = _make_torchrec_pipeline
    return train_torchrec.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
