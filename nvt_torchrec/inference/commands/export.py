"""``python -m inference export``: a bundle for other programs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag


@dataclasses.dataclass(frozen=True)
class ExportSettings(Settings):
    """What to export, and to which format."""

    # fmt: off
    bundle: Path = flag("directory made by `python -m inference bundle`", metavar="BUNDLE")
    output: Path = flag("directory to make", metavar="DIR")
    format: str = flag(
        "onnx: one file that ONNX Runtime runs, from raw columns to the probability; "
        "triton: a model repository of it for Triton Inference Server", "onnx",
        choices=("onnx", "triton"),
    )
    # fmt: on


SETTINGS = (ExportSettings,)


def run(settings: ExportSettings) -> None:
    """Export the bundle."""
    from nvt_torchrec.base.startup import prepare_torch

    prepare_torch()
    if settings.format == "onnx":
        from nvt_torchrec.inference.export.onnx_file import export_onnx

        export_onnx(settings.bundle, settings.output)
    else:
        from nvt_torchrec.inference.export.triton import export_triton

        export_triton(settings.bundle, settings.output)
    print(f"{settings.format}: {settings.output}")
