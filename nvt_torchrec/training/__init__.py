"""Training: data, what a model starts from, sharding, optimizers, the loop, checkpoints, reports.

``train(TrainSettings(…))`` trains as ``nvt-train`` does. Both are imported on first use: importing
this package imports neither torch nor TorchRec; its modules do so where they need them.
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
