"""``python -m inference export``: export a bundle for other programs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.versions import import_name
from nvt_torchrec.inference.export import FORMATS

_FORMATS_HELP = "; ".join(f"{name}: {text}" for name, (text, _) in FORMATS.items())


@dataclasses.dataclass(frozen=True)
class BundleExportSettings(Settings):
    """The bundle to export, and the format."""

    # fmt: off
    bundle: Path = flag("directory made by `python -m inference bundle`", metavar="BUNDLE")
    output: Path = flag("directory to create", metavar="DIR")
    format: str = flag(_FORMATS_HELP, "onnx", choices=tuple(FORMATS))
    # fmt: on


SETTINGS = (BundleExportSettings,)


def run(settings: BundleExportSettings) -> None:
    """Export the bundle."""
    from nvt_torchrec.base.startup import prepare_torch

    prepare_torch()
    module, _, function = FORMATS[settings.format][1].partition(":")
    export = import_name(f"nvt_torchrec.inference.export.{module}", function)
    export(settings.bundle, settings.output)
    print(f"wrote {settings.output} ({settings.format})")
