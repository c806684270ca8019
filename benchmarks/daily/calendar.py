"""The days of the benchmark: which are fitted first, which arrive later, which are scored."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from nvt_torchrec.clicklog.synthetic.model import CALENDAR_DAYS


class Morning(NamedTuple):
    """A morning on which a day of log has arrived.

    Attributes:
        newest: The day that has arrived. Every way holds its labels back: they choose and check
            the model, and are trained on a morning later.
        served: The day after, which the models of this morning score.
    """

    newest: int
    served: int


@dataclasses.dataclass(frozen=True)
class Calendar:
    """The last ``days`` days of the synthetic log, in which its most frequent late values appear.

    Attributes:
        days: The number of days.
        first_days: The number of days that the first model is made of, the held-back one included.
    """

    days: int
    first_days: int

    @property
    def first(self) -> int:
        """The first day of the log that is used."""
        return CALENDAR_DAYS - self.days

    @property
    def initial(self) -> Morning:
        """The morning on which the first model is made."""
        newest = self.first + self.first_days - 1
        return Morning(newest, newest + 1)

    @property
    def mornings(self) -> list[Morning]:
        """The mornings after the initial one."""
        return [Morning(day, day + 1) for day in range(self.initial.served, CALENDAR_DAYS - 1)]
