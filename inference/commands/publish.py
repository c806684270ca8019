"""``python -m inference publish``: put a bundle in the place of the one that is served."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.inference.commands.model import FORMATS, prepare

if TYPE_CHECKING:
    from nvt_torchrec.inference.publish.steps import Published

log = logging.getLogger(__name__)

DESCRIPTION = (
    "Compares a bundle's digests and, with --sample, its accuracy with that of the bundle that is "
    "served; then switches SERVED/current to it, which servers started with --bundle "
    "SERVED/current notice. The exit status is 3, and nothing is switched, if it is less accurate "
    "than allowed, or of an earlier generation of the workflow."
)
#: The exit status if a bundle is not allowed to be served.
REFUSED = 3


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
        "number of rows to take, from the first on", 100_000, least=1, needs="--sample"
    )
    format: str | None = flag(
        "format of the file of --sample", None, choices=FORMATS, needs="--sample"
    )
    max_auroc_drop: float = flag(
        "by how much the AUROC may be lower", 0.005, least=0, needs="--sample"
    )
    max_calibration_change: float = flag(
        "by how much further from 1 the calibration (mean prediction over mean label) may be", 0.05,
        least=0, needs="--sample"
    )
    keep: int | None = flag(
        "remove all published bundles but the last N that were served; never the one served or the "
        "one before it (default: keep all)", None, least=1, excludes=("rollback",)
    )
    allow_older: bool = flag(
        "publish a bundle whose workflow was extended to that of the served one since", False,
        excludes=("rollback",)
    )
    rollback: bool = flag("serve the bundle again that was served before", False)
    json: bool = flag("print what came of it as JSON", False)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.bundle is None) != self.rollback:
            what = "nothing to publish" if self.bundle is None else "a bundle and --rollback"
            raise SettingsError(what, "give the directory of a bundle, or --rollback")


SETTINGS = (PublishSettings,)


def run(settings: PublishSettings) -> int:
    """Publish or roll back; print the comparison and what is served. Return the exit status."""
    prepare()
    from nvt_torchrec.inference.publish.steps import Sample, publish, rollback

    if settings.bundle is None:
        done = rollback(settings.to)
    else:
        sample = None
        if settings.sample is not None:
            sample = Sample(
                settings.sample,
                settings.sample_rows,
                settings.format,
                settings.max_auroc_drop,
                settings.max_calibration_change,
            )
        older = settings.allow_older
        done = publish(settings.bundle, settings.to, sample, settings.keep, allow_older=older)
    if settings.json:
        print(json.dumps(dataclasses.asdict(done)))
    else:
        _print(done, settings)
    return REFUSED if done.refusals else 0


def _print(done: Published, settings: PublishSettings) -> None:
    from nvt_torchrec.inference.accuracy import table

    if done.metrics:
        print(table(done.metrics))
    for why in done.refusals:
        log.error("refused: %s", why)
    served, change = done.name, f", instead of {done.before}" if done.before else ""
    if done.refusals:
        served, change = done.before, " as before"
    elif done.before == done.name:
        change = " already"
    elif settings.rollback:
        change = f" again{change}"
    print(f"{settings.to}: serving {served}{change}")
    if done.removed:
        print(f"removed: {', '.join(done.removed)}")
