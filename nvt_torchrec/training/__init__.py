"""Training: data, baselines, sharding, optimizers, the training loop, checkpoints and reports.

``train(TrainSettings(…))`` does the same as ``nvt-train``. Both names are imported on first use, so
importing this package does not import torch or TorchRec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.versions import check_training_stack, find_installed_version, import_name

if TYPE_CHECKING:
    from nvt_torchrec.training.loop.train import train
    from nvt_torchrec.training.reporting.progress import TrainResult
    from nvt_torchrec.training.settings.train_settings import TrainSettings

__all__ = ["TrainResult", "TrainSettings", "train"]

_MODULES = {
    "TrainResult": "nvt_torchrec.training.reporting.progress",
    "TrainSettings": "nvt_torchrec.training.settings.train_settings",
    "train": "nvt_torchrec.training.loop.train",
}

if find_installed_version("torchrec"):
    check_training_stack()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_name(_MODULES[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
