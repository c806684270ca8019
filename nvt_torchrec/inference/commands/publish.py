"""``python -m inference publish``: replace the bundle that is served."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import TYPE_CHECKING

from nvt_torchrec.inference.commands.model import prepare
from nvt_torchrec.inference.publish import PublishSettings

if TYPE_CHECKING:
    from nvt_torchrec.inference.publish.steps import Published

log = logging.getLogger(__name__)

DESCRIPTION = (
    "Verifies a bundle's digests and, with --sample, compares its accuracy with that of the served "
    "bundle. Then switches SERVED/current to it; servers started with --bundle SERVED/current "
    "reload it. If the bundle is less accurate than allowed, or of an earlier generation of the "
    "workflow, nothing is switched and the exit status is 3."
)
#: The exit status if the bundle was refused.
REFUSED = 3

SETTINGS = (PublishSettings,)


def run(settings: PublishSettings) -> int:
    """Publish or roll back; print the comparison and the served bundle. Return the exit status."""
    prepare()
    from nvt_torchrec.inference.publish.steps import publish, rollback
    from nvt_torchrec.models.metrics import unwrap_single_label

    done = rollback(settings.to) if settings.rollback else publish(settings)
    if settings.json:
        content = dataclasses.asdict(done)
        print(json.dumps(content | {"metrics": unwrap_single_label(content["metrics"]) or {}}))
    else:
        _print(done, settings)
    return REFUSED if done.refusals else 0


def _print(done: Published, settings: PublishSettings) -> None:
    """Print the comparison, the bundle that is served now, and the bundles that were removed."""
    from nvt_torchrec.inference.publish.steps import format_table

    for label, models in done.metrics.items():
        print(format_table(models, label if len(done.metrics) > 1 else ""))
    for refusal in done.refusals:
        log.error("refused: %s", refusal)
    if done.refusals:
        served = f"{done.before} as before"
    elif done.before == done.name:
        served = f"{done.name} already"
    else:
        served = done.name
        if settings.rollback:
            served += " again"
        if done.before:
            served += f", instead of {done.before}"
    print(f"{settings.to}: serving {served}")
    if done.removed:
        print(f"removed: {', '.join(done.removed)}")
