"""Directories of published bundles: check, compare, switch, roll back.

::

    SERVED/current           symbolic link to the served bundle: bundles/NAME
    SERVED/bundles/NAME/     the bundles; NAME is the first digits of the digest
    SERVED/history.json      all publications and rollbacks (:mod:`.directory`)
    SERVED/.lock             held while a command works on the directory

The link is switched by a single rename, after everything else is on disk. So, however a command
ends, ``current`` points to a complete bundle, the old or the new one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS


@dataclasses.dataclass(frozen=True)
class PublishSettings(Settings):
    """The bundle to publish, the directory, and the limits of the comparison.

    Raises:
        SettingsError: No bundle is given, or a flag has no effect.
    """

    # fmt: off
    to: Path = flag("directory of the published bundles", metavar="SERVED")
    bundle: Path | None = flag(
        "directory made by `python -m inference bundle`", None, metavar="BUNDLE", positional=True
    )
    sample: str | None = flag(
        "file of labelled raw rows on which to compare the bundles; take a day that neither was "
        "trained on (default: do not compare)", None, metavar="FILE",
        excludes=("rollback",)
    )
    sample_rows: int = flag(
        "compare only the first N rows of --sample", 100_000, minimum=1, needs="--sample"
    )
    format: str | None = flag(
        "format of --sample (default: by the suffix of its name, or else the training log's)",
        None, choices=tuple(INPUT_FORMATS), needs="--sample"
    )
    max_auroc_drop: float = flag(
        "refuse a bundle whose AUROC is lower by more than this", 0.005, minimum=0,
        needs="--sample"
    )
    max_calibration_change: float = flag(
        "refuse a bundle whose calibration (mean prediction over mean label) is further from 1 by "
        "more than this", 0.05, minimum=0, needs="--sample"
    )
    keep: int | None = flag(
        "remove all published bundles except the last N that were served; the served bundle and "
        "the previous one always stay (default: keep all)", None, minimum=1,
        excludes=("rollback",)
    )
    allow_older: bool = flag(
        "publish the bundle even if its workflow is of an earlier generation than the served one",
        False, excludes=("rollback",)
    )
    rollback: bool = flag("serve the previous bundle again", False)
    json: bool = flag("print the result as JSON, for programs", False)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "pass the directory of a bundle, or --rollback"
        if self.bundle is None and not self.rollback:
            raise SettingsError("nothing to publish", remedy)
        if self.bundle is not None and self.rollback:
            raise SettingsError("a bundle and --rollback exclude each other", remedy)
