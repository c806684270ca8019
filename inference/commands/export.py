"""``python -m inference export``: a bundle for other programs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.inference.commands.model import FORMATS


@dataclasses.dataclass(frozen=True)
class ExportSettings(Settings):
    """What to export, and to which format."""

    # fmt: off
    bundle: Path = flag("directory made by `python -m inference bundle`", metavar="BUNDLE")
    format: str = flag(
        "torch: one file that PyTorch alone runs, from raw integers to the probability; "
        "triton: a model repository for Triton Inference Server; nvidia: feature_spec.yaml and "
        "encoded rows for NVIDIA's DLRM", choices=("torch", "triton", "nvidia")
    )
    output: Path = flag("directory to make", metavar="DIR")
    compile: bool = flag(
        "torch: also compile by AOTInductor; needs a C++ compiler", False, needs="--format torch"
    )
    train: str | None = flag(
        "nvidia: raw rows that become train/", None, metavar="FILE", needs="--format nvidia"
    )
    test: str | None = flag(
        "nvidia: raw rows that become test/", None, metavar="FILE", needs="--format nvidia"
    )
    input_format: str | None = flag("nvidia: format of these rows", None, choices=FORMATS)
    # fmt: on


SETTINGS = (ExportSettings,)


def run(settings: ExportSettings) -> None:
    """Export the bundle.

    Raises:
        OutputError: The output exists.
    """
    if settings.output.exists():
        raise OutputError(
            f"{settings.output} exists", "choose another --output, or remove it first"
        )
    from nvt_torchrec.dlrm.launch.startup import prepare_torch

    prepare_torch()
    if settings.format == "torch":
        from nvt_torchrec.inference.export.torch_package import export_torch

        export_torch(settings.bundle, settings.output, compiled=settings.compile)
    elif settings.format == "triton":
        from nvt_torchrec.inference.export.triton import export_triton

        export_triton(settings.bundle, settings.output)
    else:
        from nvt_torchrec.inference.export.nvidia import export_nvidia

        given = {"train": settings.train, "test": settings.test}
        logs = {mapping: path for mapping, path in given.items() if path}
        written = export_nvidia(settings.bundle, settings.output, logs, settings.input_format)
        for mapping, rows in written.items():
            print(f"{mapping}: {rows} rows")
    print(f"{settings.format}: {settings.output}")
