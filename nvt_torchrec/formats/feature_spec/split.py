"""Which rows are for training, validation and test."""

from __future__ import annotations

import dataclasses

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.field_checks import check, format_choices
from nvt_torchrec.formats.feature_spec.raw_types.time import check_time_format, parse_iso


@dataclasses.dataclass(frozen=True)
class Split:
    """The rule by which rows are divided into train, valid and test.

    Attributes:
        by: ``days``: the last day is halved into valid and test, all earlier ones are train.
            ``share``: a seeded hash of a row's place, its file and row number, decides.
            ``column``: a seeded hash of a column's value, so that for example a user's rows are all
            on one side. ``time``: rows before a time are train, those after another one test.
            ``files``: as the input files are named. ``values``: as the texts of a column say.
        valid: By share, column or time, the share of the rows (by time, the share just before
            test's) for validation; by files or values, the share of the rows for training.
        test: Likewise for test; not by files or values.
        seed: Of the hash.
        column: By column, time or values, the name of a column of the file; it need not be a
            feature.
        time_format: By time, see :func:`check_time_format`.
        valid_from: By time, instead of shares: when validation begins, as ISO 8601.
        test_from: By time: when test begins.
        train_files: By files, names or globs below the input directory.
        valid_files: Likewise; () with ``valid`` as a share.
        test_files: Likewise.
        train_values: By values, the texts of the column in rows for training.
        valid_values: Likewise; () with ``valid`` as a share.
        test_values: Likewise.
    """

    by: str = "days"
    valid: float = 0
    test: float = 0
    seed: int = 0
    column: str = ""
    time_format: str = ""
    valid_from: str = ""
    test_from: str = ""
    train_files: tuple[str, ...] = ()
    valid_files: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()
    train_values: tuple[str, ...] = ()
    valid_values: tuple[str, ...] = ()
    test_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.by not in SPLIT_BY:
            raise SettingsError(f"split by {self.by!r}", format_choices(SPLIT_BY))
        takes = SPLIT_BY[self.by]
        names = "/".join((*self.train_files, *self.valid_files, *self.test_files))
        listed = ", ".join(dict.fromkeys(map(spec_key, takes))) or "nothing else"
        shares = self.valid > 0 and self.test > 0 and self.valid + self.test < 1
        shares |= self.by not in ("share", "column", "time") or bool(self.valid_from)
        times = bool(self.valid_from) == bool(self.test_from)
        times &= not (self.valid_from and (self.valid or self.test))
        valid_once = bool(self.valid_files) != bool(self.valid)
        files = self.train_files and self.test_files and valid_once
        check(
            self,
            f"split by {self.by}: ",
            *(
                (field.name, getattr(self, field.name) == field.default, f"it takes {listed}")
                for field in dataclasses.fields(self)
                if field.name not in ("by", *takes)
            ),
            *(
                (name, 0 <= getattr(self, name) < 1, "give a share from 0 to below 1")
                for name in ("valid", "test")
            ),
            ("seed", self.seed >= 0, "give an integer from 0 on"),
            ("column", self.column or "column" not in takes, 'name one, such as column = "user"'),
            ("valid_from", times, f"give {_TIMES}; or {_SHARES}"),
            (
                "valid",
                shares,
                f"give {_SHARES}; or {_TIMES}" if self.by == "time" else f"give {_SHARES}",
            ),
            ("train_files", files or self.by != "files", f"give {_FILES}"),
            ("train_files", ".." not in names.split("/"), "name files below the input directory"),
        )
        if self.by == "time":
            check_time_format(self.time_format, "split by time: ")
        if self.by == "values":
            self._check_values()
        if self.valid_from:
            first, second = (
                parse_iso(getattr(self, name), f"split: {name}")
                for name in ("valid_from", "test_from")
            )
            check(self, "split: ", ("valid_from", first < second, "give a test_from after it"))

    def _check_values(self) -> None:
        """Check the texts of a split by values."""
        valid_once = bool(self.valid_values) != bool(self.valid)
        texts = list(self.side_of_value)
        given = len(self.train_values) + len(self.valid_values) + len(self.test_values)
        check(
            self,
            "split by values: ",
            ("train_values", self.train_values and self.test_values, f"give {_VALUES}"),
            ("valid_values", valid_once, f"give {_VALUES}"),
            ("train_values", len(texts) == given, "a text stands there twice: give it once"),
            ("train_values", all(text.strip(" \t") == text != "" for text in texts), _TEXTS),
        )

    @property
    def side_of_value(self) -> dict[str, int]:
        """By values: for each text of the column, the index of its split in ``SPLITS``."""
        sides = (self.train_values, self.valid_values, self.test_values)
        return {text: side for side, texts in enumerate(sides) for text in texts}


def spec_key(name: str) -> str:
    """Return the key of ``[split]`` in a spec for a field of :class:`Split`."""
    return name.removesuffix("_files").removesuffix("_values")


_TIMES = 'valid_from = "2014-10-29" and test_from = "2014-10-30"'
_SHARES = "shares, less than 1 together, such as valid = 0.1, test = 0.1"
_FILES = (
    'train = "train*.csv", test = "test.csv", and valid = "valid.csv" or a share of the training '
    "rows, valid = 0.1"
)
_VALUES = (
    'train = "train", test = "test", and valid = "valid" or a share of the rows for training, '
    "valid = 0.1"
)
_TEXTS = "give texts without spaces around them; rows without one belong to no split"
#: What each kind of split takes.
SPLIT_BY: dict[str, tuple[str, ...]] = {
    "days": (),
    "share": ("valid", "test", "seed"),
    "column": ("column", "valid", "test", "seed"),
    "time": ("column", "time_format", "valid_from", "test_from", "valid", "test"),
    "files": ("train_files", "valid_files", "test_files", "valid", "seed"),
    "values": ("column", "train_values", "valid_values", "test_values", "valid", "seed"),
}

#: The last day is halved, as TorchRec's and NVIDIA's scripts do.
BY_DAYS = Split()
#: For files whose names say nothing.
ANY_FILES = Split("share", 0.1, 0.1)
