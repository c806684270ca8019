"""Labels: which texts or numbers of a column are positive."""

from __future__ import annotations

import dataclasses

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.spec.limits import is_finite_number


@dataclasses.dataclass(frozen=True)
class LabelRule:
    """A label and how it is read; a label may be missing only if ``negative`` has "".

    Without ``positive`` and ``threshold``, values are 0 and 1, also written 0.0 and 1.0.

    Attributes:
        name: of the label's column in the output.
        source: the column of the file, "" for the same name. Several labels may share one.
        positive: texts that are 1. Any other text is 0.
        negative: with ``positive``, the texts that are 0; any other text is then malformed.
        threshold: numbers that are at least this are 1, others 0.
        trim: whether spaces and tabs around a value are removed.
    """

    name: str
    source: str = ""
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    threshold: float | None = None
    trim: bool = False

    def __post_init__(self) -> None:
        for field in ("positive", "negative"):
            texts = getattr(self, field)
            if not all(isinstance(text, str) and (text or field == "negative") for text in texts):
                raise SettingsError(
                    f"label {self.name}: {field} = {list(texts)!r}",
                    'give a list of strings, such as ["yes", "true"]',
                )
        if self.positive and self.threshold is not None:
            raise SettingsError(
                f"label {self.name}: both positive and threshold", "remove one of the two"
            )
        if self.negative and not self.positive:
            raise SettingsError(f"label {self.name}: negative without positive", "add positive")
        both = set(self.positive) & set(self.negative)
        if both:
            raise SettingsError(
                f"label {self.name}: {sorted(both)} are positive and negative", "choose one"
            )
        if self.threshold is not None and not is_finite_number(self.threshold):
            raise SettingsError(
                f"label {self.name}: threshold = {self.threshold!r}", "give a finite number"
            )

    @property
    def column(self) -> str:
        """The column of the file."""
        return self.source or self.name
