"""Train and serve TorchRec models from click logs: the public names of the library.

The names are imported on first use, because torch, TorchRec and NVTabular take seconds to import
and may not be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvt_torchrec.base import __version__

if TYPE_CHECKING:
    from nvt_torchrec.estimator.classifier import ClickModel
    from nvt_torchrec.etl.run import run
    from nvt_torchrec.etl.settings import EtlSettings
    from nvt_torchrec.inference.encoder import Encoder
    from nvt_torchrec.inference.predictor import Predictor
    from nvt_torchrec.inference.scorer import Scorer
    from nvt_torchrec.nvt_loader.loader import KJTLoader
    from nvt_torchrec.training.loop.train import train
    from nvt_torchrec.training.settings.train_settings import TrainSettings
    from nvt_torchrec.workflows.store import load

    __all__ = [
        "ClickModel",
        "Encoder",
        "EtlSettings",
        "KJTLoader",
        "Predictor",
        "Scorer",
        "TrainSettings",
        "__version__",
        "load",
        "run",
        "train",
    ]

_MODULES = {
    "ClickModel": "nvt_torchrec.estimator.classifier",
    "Encoder": "nvt_torchrec.inference.encoder",
    "EtlSettings": "nvt_torchrec.etl.settings",
    "KJTLoader": "nvt_torchrec.nvt_loader.loader",
    "Predictor": "nvt_torchrec.inference.predictor",
    "Scorer": "nvt_torchrec.inference.scorer",
    "TrainSettings": "nvt_torchrec.training.settings.train_settings",
    "load": "nvt_torchrec.workflows.store",
    "run": "nvt_torchrec.etl.run",
    "train": "nvt_torchrec.training.loop.train",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":  # `from nvt_torchrec import *` asks for it
        return _find_importable_names()
    if name in _MODULES:
        from nvt_torchrec.base.versions import import_name

        return import_name(_MODULES[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _find_importable_names() -> list[str]:
    """Return the names whose required packages are installed (by the extras of this package)."""
    from nvt_torchrec.base.versions import UnsupportedStackError

    names = ["__version__"]
    for name in _MODULES:
        try:
            __getattr__(name)
        except UnsupportedStackError:
            continue
        names.append(name)
    return names
