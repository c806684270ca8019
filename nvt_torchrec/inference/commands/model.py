"""The flags that name a model, for all subcommands that score rows."""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError

if TYPE_CHECKING:
    from nvt_torchrec.inference.predictor import Predictor

TABLES = ("float32", "float16", "int8")
OWN_MODEL = (
    "the function that builds a model of your own, as passed to the trainer; its code is executed"
)


@functools.cache
def prepare() -> None:
    """Prepare the process for PyTorch, once, before torch is imported."""
    # If a mapped file is truncated while it is in use, SIGBUS ends the process. The fault handler
    # then prints "Bus error" and the Python stack.
    faulthandler.enable(sys.__stderr__ or 2)
    from nvt_torchrec.base.startup import prepare_torch

    prepare_torch()


@dataclasses.dataclass(frozen=True)
class ModelSettings(Settings):
    """The model to load, and its device.

    Raises:
        SettingsError: No model is named, or more than one.
    """

    # fmt: off
    bundle: Path | None = flag(
        "directory made by `python -m inference bundle`; replaces --workflow and --checkpoint",
        None, metavar="BUNDLE"
    )
    workflow: Path | None = flag(
        "directory of the saved workflow; needs --checkpoint", None, metavar="OUT/workflow"
    )
    checkpoint: Path | None = flag(
        "directory of the training checkpoint; needs --workflow", None, metavar="CKPT"
    )
    model: str | None = flag(
        f"with --checkpoint: {OWN_MODEL}", None, metavar="MODULE:FUNCTION"
    )
    device: str = flag("device of the model: cpu, cuda, cuda:1 …", "cpu", metavar="DEVICE")
    tables: str | None = flag(
        "type of the embeddings (default: the bundle's; float32 for a checkpoint)", None,
        choices=TABLES
    )
    skip_digests: bool = flag(
        "start faster: do not verify the digests of the bundle's or workflow's files, so that "
        "damage goes unnoticed",
        False
    )
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bundle is not None:
            is_one_model = self.workflow is None and self.checkpoint is None
        else:
            is_one_model = self.workflow is not None and self.checkpoint is not None
        if not is_one_model:
            raise SettingsError(
                "no model, or two", "pass --bundle, or both --workflow and --checkpoint"
            )
        if self.model is not None and self.bundle is not None:
            raise SettingsError(
                f"--model {self.model} with --bundle, which contains its model",
                "leave --model out",
            )

    def load(self, *, bundle: Path | None = None) -> Predictor:
        """Load the model.

        Args:
            bundle: The bundle to open instead of ``self.bundle``.

        Raises:
            ClickLogError: Any error that :meth:`inference.predictor.Predictor.load` raises.
        """
        prepare()
        from nvt_torchrec.inference.model.served_checkpoint import import_model
        from nvt_torchrec.inference.predictor import Predictor

        return Predictor.load(
            bundle or self.bundle or self.workflow or "",
            self.checkpoint,
            device=self.device,
            tables=self.tables,
            model=import_model(self.model, self.checkpoint),
            check=not self.skip_digests,
        )
