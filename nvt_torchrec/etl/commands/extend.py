"""``python -m etl extend``: add new days to a finished output, without a new fit."""

from __future__ import annotations

import json

from nvt_torchrec.etl.commands.run import describe_rows
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.splits import SPLITS

DESCRIPTION = (
    "Add new days to the OUT of `python -m etl run`. Values keep their ids, so the parquet of "
    "earlier days does not change; new values that qualify for an id get the next ones. Each day "
    "is a generation. The newest day is halved into valid and test, all others are for training; "
    "rows that are split by share, column, time or values go where the spec's [split] says. "
    "OUT remains the previous generation until the new one is complete. The same command "
    "continues an interrupted extension; --undo takes the newest day back."
)
SETTINGS = (ExtendSettings,)


def run(settings: ExtendSettings) -> None:
    """Add the days, and print the generation, days and rows that the output has now.

    Raises:
        ClickLogError: A setting is not allowed, or what :func:`etl.extend.extend.extend` raises.
    """
    from nvt_torchrec.etl.extend.extend import extend
    from nvt_torchrec.formats.day_names import format_day_title

    manifest = extend(settings)
    rows = manifest["rows"]
    if settings.json:
        values = {"generation": manifest.generation, "days": manifest.days, "rows": rows}
        print(json.dumps(values))
        return
    titles = {file["day"]: format_day_title(file["path"]) for file in manifest["inputs"]}
    print(f"generation {manifest['generation']}")
    for split in SPLITS:
        days = ",".join(titles[day] or str(day) for day in manifest["days"][split])
        print(f"{split}: {manifest['splits'][split]['rows']} rows of days {days}")
    print(f"{describe_rows(rows)}, over all days")
    print(f"table sizes: --num_embeddings_per_feature {manifest['num_embeddings_per_feature']}")
