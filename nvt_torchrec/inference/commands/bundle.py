"""``python -m inference bundle``: pack a workflow and a checkpoint into one movable directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.inference.commands.model import OWN_MODEL, TABLES


@dataclasses.dataclass(frozen=True)
class BundleSettings(Settings):
    """The workflow and the checkpoint to bundle, and the type in which tables are stored."""

    # fmt: off
    workflow: Path = flag("directory of the saved workflow", metavar="OUT/workflow")
    checkpoint: Path = flag("directory of the training checkpoint", metavar="CKPT")
    output: Path = flag("directory to create", metavar="BUNDLE")
    tables: str = flag(
        "type of the embeddings; float16 takes half the memory, int8 about a quarter", "float32",
        choices=TABLES
    )
    model: str | None = flag(OWN_MODEL, None, metavar="MODULE:FUNCTION")
    # fmt: on


SETTINGS = (BundleSettings,)


def run(settings: BundleSettings) -> None:
    """Write the bundle; print its size."""
    from nvt_torchrec.base.startup import prepare_torch

    prepare_torch()
    from nvt_torchrec.inference.model.bundle import write_bundle
    from nvt_torchrec.inference.model.served_checkpoint import import_model

    output = settings.output
    is_new = write_bundle(
        settings.workflow,
        settings.checkpoint,
        output,
        tables=settings.tables,
        build=import_model(settings.model, settings.checkpoint),
    )
    if is_new:
        size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
        print(f"{output}: {size / 2**20:.1f} MiB")
    else:
        print(f"{output}: already made from this workflow and checkpoint")
