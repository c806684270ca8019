"""Directories of published bundles: check, compare, switch, roll back.

::

    SERVED/current           symbolic link to the bundle that is served: bundles/NAME
    SERVED/bundles/NAME/     the bundles, by the first digits of their digests
    SERVED/history.json      what was published and rolled back, see :mod:`.directory`
    SERVED/.lock             held while a command works on the directory

The link is switched by a single rename, after all else is on the disk. So, however a command ends,
``current`` leads to one whole bundle, the old or the new.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS


@dataclasses.dataclass(frozen=True)
class PublishSettings(Settings):
    """What to publish, where, and what it must not be worse than.

    Raises:
        SettingsError: There is nothing to publish, or a flag has no effect.
    """

    # fmt: off
    to: Path = flag("directory of the published bundles", metavar="SERVED")
    bundle: Path | None = flag(
        "directory made by `python -m inference bundle`", None, metavar="BUNDLE", positional=True
    )
    sample: str | None = flag(
        "labelled raw rows, of a day that neither bundle was trained on, to compare the bundles on "
        "(default: do not compare)", None, metavar="FILE",
        excludes=("rollback",)
    )
    sample_rows: int = flag(
        "number of first rows of --sample to compare on", 100_000, minimum=1, needs="--sample"
    )
    format: str | None = flag(
        "format of the file of --sample", None, choices=tuple(INPUT_FORMATS), needs="--sample"
    )
    max_auroc_drop: float = flag(
        "by how much the AUROC may be lower", 0.005, minimum=0, needs="--sample"
    )
    max_calibration_change: float = flag(
        "by how much further from 1 the calibration (mean prediction over mean label) may be", 0.05,
        minimum=0, needs="--sample"
    )
    keep: int | None = flag(
        "remove all published bundles but the last N that were served, and nothing else; never the "
        "one served or the one before it (default: keep all)", None, minimum=1,
        excludes=("rollback",)
    )
    allow_older: bool = flag(
        "publish a bundle of an earlier generation of the workflow than the served one", False,
        excludes=("rollback",)
    )
    rollback: bool = flag("serve the previous bundle again", False)
    json: bool = flag("print the result as JSON, for programs", False)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "give the directory of a bundle, or --rollback"
        if self.bundle is None and not self.rollback:
            raise SettingsError("nothing to publish", remedy)
        if self.bundle is not None and self.rollback:
            raise SettingsError("a bundle and --rollback", remedy)
