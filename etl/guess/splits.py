"""Which rows are for training: a split to which further days can be added, where there is one."""

from __future__ import annotations

import datetime
import re
from typing import Any

from nvt_torchrec.etl.guess.labels import without_type
from nvt_torchrec.etl.guess.sample import SampledFile
from nvt_torchrec.etl.guess.times import to_time
from nvt_torchrec.etl.guess.values import Profile

BIRTHS = re.compile(r"birth|dob", re.IGNORECASE)
_USERS = re.compile(
    r"(user|uid|customer|client|member|visitor|viewer|household|session)_?(id|key|hash|code|no)?",
    re.IGNORECASE,
)
#: From which span on cuts are at midnight.
_LONG = datetime.timedelta(days=10)
_SHARES = {"valid": 0.1, "test": 0.1}


def choose_split(columns: list[Profile], sample: SampledFile) -> tuple[dict[str, Any], str]:
    """Return the keys of ``[split]`` and why, given the columns that are no labels."""
    if sample.days:
        return {"by": "days"}, (
            f"the log has a file for each day: pass {sample.days} as --input_path; the last day is "
            "halved into valid and test, and `etl extend` adds further ones"
        )
    keys = [c for c in columns if c.name and not c.missing and not c.multi_hot]
    times = [c for c in keys if c.kind == "time" and c.distinct >= 10 and not BIRTHS.search(c.name)]
    if times:
        return _by_time(max(times, key=lambda column: column.distinct), sample)
    for column in keys:
        often = column.present / max(column.distinct, 1)
        if _USERS.fullmatch(without_type(column.name)) and column.distinct >= 20 and often > 1.1:
            return {"by": "column", "column": column.name, **_SHARES}, (
                f"all rows of a {column.name} are on one side, because no column is a time; "
                'by = "share" splits the rows at random'
            )
    return {"by": "share", **_SHARES}, (
        'at random, because no column is a time; by = "column" keeps the rows of a user together'
    )


def _by_time(column: Profile, sample: SampledFile) -> tuple[dict[str, Any], str]:
    split: dict[str, Any] = {"by": "time", "column": column.name}
    if column.time_format:
        split["time_format"] = column.time_format
    why = f"{column.name} is a time, and a model scores rows newer than those it was trained on"
    cuts = _cuts(column, sample) if sample.whole or sample.spread else None
    if cuts is None:
        return {**split, **_SHARES}, (
            f"{why}: the last tenth of the rows is test. For days that `etl extend` adds later, "
            "give the cuts themselves: valid_from and test_from instead of the shares"
        )
    says = "the last tenths of the rows" if sample.whole else "the last tenths of the time"
    split |= {"valid_from": _text(cuts[0]), "test_from": _text(cuts[1])}
    return split, (
        f"{why}: valid and test are {says}. Rows that `etl extend` adds later are test; "
        "shares, valid = 0.1 and test = 0.1, cannot be extended"
    )


def _cuts(
    column: Profile, sample: SampledFile
) -> tuple[datetime.datetime, datetime.datetime] | None:
    """Return when validation and test begin; None if the times cannot be cut so."""
    known = {text: to_time(text, column.time_format) for text in column.counts}
    times = sorted(known[text] for text in column.counts.elements())
    first, last = times[0], times[-1]
    if sample.whole:
        cuts = [times[int(share * len(times))] for share in (0.8, 0.9)]
    else:
        cuts = [first + share * (last - first) for share in (0.8, 0.9)]
    if last - first >= _LONG:
        days = [cut.replace(hour=0, minute=0, second=0, microsecond=0) for cut in cuts]
        cuts = days if len(set(days)) == len(days) else cuts
    if not first < cuts[0] < cuts[1] <= last:
        return None
    return cuts[0].replace(microsecond=0), cuts[1].replace(microsecond=0)


def _text(time: datetime.datetime) -> str:
    time = time.astimezone(datetime.UTC)
    midnight = (time.hour, time.minute, time.second) == (0, 0, 0)
    return f"{time:%Y-%m-%d}" if midnight else f"{time:%Y-%m-%d %H:%M:%S}"
