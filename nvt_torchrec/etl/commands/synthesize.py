"""``python -m etl synthesize``: a click log with a known best AUROC."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.clicklog.synthetic.click_model import SyntheticSettings
from nvt_torchrec.etl.settings import threads_flag

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SynthesizeSettings(Settings):
    """The settings of ``python -m etl synthesize`` that do not describe the log itself."""

    output_path: Path = flag("directory for day_0 … and synthetic.json: new or empty")
    workers: int = threads_flag()


SETTINGS = (SynthesizeSettings, SyntheticSettings)


def run(settings: SynthesizeSettings, synthetic: SyntheticSettings) -> None:
    """Write the log, and print the AUROC that a perfect model would reach on it.

    Raises:
        OutputError: The output directory is not empty or cannot be written.
    """
    from nvt_torchrec.clicklog.synthetic.log import SUMMARY_FILE, synthesize

    begin = time.monotonic()
    summary = synthesize(settings.output_path, synthetic, workers=settings.workers)
    seconds = time.monotonic() - begin
    log.info(
        "%s: %d days, %d rows, %.1f %% clicks, %.1f s (%.0f rows/s)",
        settings.output_path,
        synthetic.days,
        summary["rows"],
        100 * summary["positives"] / summary["rows"],
        seconds,
        summary["rows"] / seconds,
    )
    for split, score in summary["oracle"].items():
        auroc = "undefined" if score["auroc"] is None else f"{score['auroc']:.4f}"
        log.info("oracle AUROC %-5s %s (%d rows)", split, auroc, score["rows"])
    log.info("details: %s", settings.output_path / SUMMARY_FILE)
